"""What a chat does with a model: send a message, generate another answer, undo, make room in a full context, change the
model."""

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.answer import Outcome, answer
from engine.cli.conversation import Conversation
from engine.cli.lines import Reader
from engine.cli.opened import Opened
from engine.cli.report import Report
from engine.cli.settings import Settings
from engine.errors import ContextError, EngineError, UsageError

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.text.template.chat import ChatTemplate


class Session:
    """A model, its settings, and the conversation with it.

    Without a template, the model continues bare texts that have nothing to do with each other: that conversation holds only
    the latest one, and the one with templates waits. ``draft`` is the text that the next prompt begins with, to be edited;
    ``file`` is the file of the conversation, and ``files`` are those that this session may overwrite, because it has written
    or loaded them.
    """

    def __init__(
        self,
        opened: Opened,
        report: Report,
        reader: Reader,
        open_model: Callable[[Path], Opened],
        system: str | None = None,
    ) -> None:
        self.report = report
        self.settings = Settings(opened.options)
        self.draft = ""
        #: Texts of files that come before the next message.
        self.attached: list[str] = []
        self.file: Path | None = None
        self.files: set[Path] = set()
        self.reader = reader
        self._opened = opened
        self._open_model = open_model
        self._messages, self._bare = Conversation(system), Conversation()

    @property
    def llm(self) -> "LLM":
        """The model that answers."""
        return self._opened.llm

    @property
    def template(self) -> "ChatTemplate | None":
        """Its chat template; None to continue each text as it is."""
        return self._opened.template

    @property
    def conversation(self) -> Conversation:
        """The messages and answers."""
        return self._bare if self.template is None else self._messages

    def explain(self) -> None:
        """Says what happens to texts if there is no template."""
        if self.template is None:
            self.report.line(
                "this model has no chat template: each text you enter is continued by itself, as it is"
                + ("; the conversation waits for a model that has one" if self._messages.turns else "")
            )

    def open(self, path: Path) -> None:
        """Replaces the model by the one at ``path``.

        The messages stay and are read again. So do the settings that the user has changed, except biases of tokens if the
        vocabulary is another one. If the new model cannot be opened, raises EngineError, MemoryError or KeyboardInterrupt,
        and nothing has changed.
        """
        old, opened = self._opened, self._open_model(path)
        try:
            before, after = Settings(old.options).options, Settings(opened.options).options
            changed = {name: value for name, value in self.settings.options.items() if value != before[name]}
            settings = Settings(after | changed)
            if settings["logit_bias"] and _tokens(old.llm) != _tokens(opened.llm):
                settings = Settings(settings.options | {"logit_bias": {}})
                self.report.line("note: logit_bias was emptied, because the tokens of this model have other numbers")
        except BaseException:
            opened.llm.close()
            raise
        self._opened, self.settings = opened, settings
        self._messages.forget_ids()
        old.llm.close()
        self.explain()

    def send(self, message: str) -> None:
        """Adds a message and its answer. If there is no answer, removes the message and raises EngineError, or
        KeyboardInterrupt if Ctrl-C came before the first token."""
        conversation = self.conversation
        if self.template is None:
            conversation.clear()
            conversation.add("user", message)
        else:
            conversation.add("user", "\n\n".join([*self.attached, message]))
        try:
            self._answer()
        finally:
            if conversation.turns[-1]["role"] == "user":
                conversation.turns.pop()
            elif self.template is not None:
                self.attached.clear()

    def regenerate(self) -> None:
        """Replaces the last answer by another one, which needs another seed; raises UsageError if there is none to replace.
        The old answer stays if there is no new one."""
        turns, settings = self.conversation.turns, self.settings
        if not turns:
            raise UsageError("there is no answer to replace yet")
        if settings["temperature"] <= 0:
            raise UsageError("with temperature 0 the answer is always the same: /set temperature 0.8, for example")
        if (seed := settings["seed"]) >= 0:
            self.settings = settings.changed({"seed": (seed + 1) % 2**64})
            self.report.line(f"using seed {self.settings['seed']}, because {seed} would give the same answer")
        old = turns.pop()
        try:
            self._answer()
        finally:
            if turns[-1]["role"] == "user":
                turns.append(old)
                self.settings = settings

    def undo(self) -> None:
        """Removes the last message and its answer, and offers the message for editing; raises UsageError if there is none."""
        if not self.conversation.turns:
            raise UsageError("there is no message to remove")
        self.draft = self.conversation.undo()

    # -- one answer

    def _answer(self) -> None:
        """Answers the last message, and goes on in a context with fewer messages if it is full and the user agrees."""
        conversation = self.conversation
        while True:
            try:
                reply = self._ask(self._prompt())
                break
            except ContextError as error:
                # If the context stays full whatever is dropped, this raises an error and ends the loop.
                self._make_room(error)
        begun, ids = "", list(reply.generation.ids)
        self._record(reply)
        # A grammar would begin anew in the middle of the answer.
        while self._is_full(reply) and self.settings.options.get("grammar") is None:
            try:
                self._make_room(ContextError("the answer has filled the context"), ids)
            except EngineError as error:
                self.report.line(f"note: {error}")
                return
            begun = conversation.turns.pop()["content"]
            prompt = self._prompt() + ids
            try:
                reply = self._ask(prompt)
            except BaseException:
                conversation.add("assistant", begun)
                raise
            ids += reply.generation.ids
            self._record(reply, begun)

    def _ask(self, prompt: Sequence[int] | str) -> Outcome:
        """Answers token ids, or a bare text, and shows the answer."""
        options = self.settings.options
        echo = prompt if isinstance(prompt, str) else ""
        return answer(self.llm, prompt, options, self.report, echo=echo, prose=self._opened.is_prose(options))

    def _prompt(self) -> Any:
        return (
            self.conversation.turns[-1]["content"] if self.template is None else self.conversation.prompt(self.template)
        )

    def _record(self, reply: Outcome, begun: str = "") -> None:
        generation = reply.generation
        if reply.interrupted and not begun + generation.text:
            raise KeyboardInterrupt
        self.conversation.answered(generation, self.llm.detokenize(generation.ids), begun)
        if not sys.stdout.isatty() and not generation.text.endswith("\n"):
            sys.stdout.write("\n")  # separates the answers in a file
        if reply.reread is not None:
            self.report.line(f"note: {reply.reread}")
        self.report.turn(generation, reason=reply.reason, n_ctx=self.llm.n_ctx)

    def _is_full(self, reply: Outcome) -> bool:
        generation = reply.generation
        return reply.reason == "length" and len(generation.prompt_ids) + len(generation.ids) >= self.llm.n_ctx

    # -- a full context

    def _make_room(self, error: ContextError, begun: Sequence[int] = ()) -> None:
        """Offers to drop the oldest messages except the first and its answer, as many as leave a quarter of the context.

        begun: the ids of the answer so far. Raises the error with advice if nobody agrees, or if that is not enough.
        """
        conversation, template, n_ctx = self.conversation, self.template, self.llm.n_ctx
        if template is None or not conversation.n_droppable and len(conversation.turns) == 1:
            raise error
        why = str(error).rstrip(".")
        if not self.reader.interactive:
            raise ContextError(f"{why}; /clear starts a new conversation") from error

        def size(pairs: int) -> int:
            messages = conversation.without(2 * pairs)
            if begun:
                messages.pop()
            return len(template.encode(messages)) + len(begun)

        pairs = range(conversation.n_droppable // 2 + 1)
        n = bisect_left(pairs, True, key=lambda pairs: size(pairs) <= n_ctx - n_ctx // 4)
        n = min(n, len(pairs) - 1)
        if n == 0 or size(n) >= n_ctx:
            what = "there are no earlier messages to drop" if n == 0 else "dropping the earlier messages is not enough"
            raise ContextError(f"{why}, and {what}: /clear starts a new conversation") from error
        self.report.line(why)
        if not self.reader.confirm(f"drop the {2 * n} oldest messages after the first exchange and continue?"):
            raise ContextError("nothing was dropped: /clear starts a new conversation") from error
        conversation.drop(2 * n)
        self.report.line(f"{2 * n} messages were dropped")


def _tokens(llm: "LLM") -> Sequence[bytes | str]:
    return llm.tokenizer.vocabulary.tokens
