"""One answer, and a conversation of many: streaming, Ctrl-C, and the commands of the chat."""

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from engine.cli.report import Report, printable
from engine.errors import ContextError, EngineError

if TYPE_CHECKING:
    from engine.decode.generation import Generation
    from engine.llm import LLM
    from engine.text.template.chat import ChatTemplate

HELP = """\
/help            this list
/clear           forget the conversation (the system prompt stays)
/save [FILE]     write the conversation to a JSON file
/quit            exit, as Ctrl-D does
A line that ends with \\ continues on the next; \"\"\" begins and ends a message of many lines.
Ctrl-C ends an answer; at the prompt it exits."""


@dataclass(frozen=True)
class Answer:
    """A finished generation, whether Ctrl-C ended it, and why tokens were read again for it, if they were."""

    generation: "Generation"
    interrupted: bool
    reread: str | None = None

    @property
    def reason(self) -> str:
        """``stop`` (end of text, or a stop string), ``length`` (limit or context), or ``interrupted``."""
        return "interrupted" if self.interrupted else str(self.generation.finish_reason)


Ask = Callable[[Sequence[int]], Answer]


def answer(
    llm: "LLM",
    prompt: str | Sequence[int],
    options: Mapping[str, Any],
    report: Report,
    *,
    show: bool = True,
    echo: str = "",
) -> Answer:
    """Generates one answer and, with ``show``, writes it to stdout piece by piece; raises EngineError.

    ``options`` are the keyword arguments of ``LLM.generate``. ``echo`` is shown first on a terminal. The first Ctrl-C ends
    the answer after the current token, so that the cache stays consistent; the second ends it immediately.
    """
    terminal = sys.stdout.isatty()
    with ctrl_c() as pressed:

        def on_prefill(done: int, total: int) -> None:
            report.progress("prompt", done, total)
            if pressed.is_set():
                raise KeyboardInterrupt

        generation = llm.generate(prompt, on_prefill=on_prefill, **options)
        try:
            first = True
            for piece in generation:
                if first and show:
                    report.echo(echo)
                first = False
                if show and piece:
                    sys.stdout.write(printable(piece) if terminal else piece)
                    sys.stdout.flush()
                report.live(generation)
                if pressed.is_set():
                    break
        except KeyboardInterrupt:
            pressed.set()
        finally:
            generation.close()
            report.answered(generation.text, shown=show)
    return Answer(generation, pressed.is_set() and generation.finish_reason is None, llm.reread)


@contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event; the second is a KeyboardInterrupt as usual."""
    pressed = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    # A shell makes a background job ignore the signal; a thread must not change handlers at all.
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Conversation:
    """The messages so far, as a chat template takes them: ``{"role": ..., "content": ...}``."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        #: The latest prompt and its answer, as text and as ids.
        self.known: tuple[str, list[int]] | None = None
        self._asked = ""
        self.saved: set[Path] = set()
        self.clear()

    def clear(self) -> None:
        """Removes all messages except the system prompt."""
        self.known = None
        self.messages = [{"role": "system", "content": self.system}] if self.system is not None else []

    def add(self, role: str, content: str) -> None:
        """Appends one message."""
        self.messages.append({"role": role, "content": content})

    def prompt(self, template: "ChatTemplate") -> list[int]:
        """The token ids to answer; earlier prompts and answers keep the ids they had, so that they need not be read again."""
        self._asked = template.render(self.messages)
        return template.encode(self.messages, known=self.known)

    def answered(self, generation: "Generation", text: str) -> None:
        """Records the answer to the latest prompt; ``text`` is what its ids stand for."""
        self.add("assistant", generation.text)
        # A stop text is cut off, and an incomplete character is not shown: then the ids hold more than the conversation.
        whole = text == generation.text and text != ""
        self.known = (self._asked + text, [*generation.prompt_ids, *generation.ids]) if whole else None

    def save(self, name: str) -> Path:
        """Writes the messages as JSON, but never overwrites a file that this conversation did not write. Raises
        EngineError."""
        path = Path(name or time.strftime("chat-%Y%m%d-%H%M%S.json")).expanduser()
        text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
        try:
            with path.open("w" if path in self.saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise EngineError(f"{path} exists: give /save another name") from error
        except OSError as error:
            raise EngineError(f"the conversation cannot be saved to {path}: {error.strerror}") from error
        self.saved.add(path)
        return path


def chat(
    llm: "LLM",
    template: "ChatTemplate",
    ask: Ask,
    report: Report,
    *,
    system: str | None = None,
    first: str | None = None,
) -> int:
    """Runs a conversation until /quit or the end of stdin, and returns the exit status; ``first`` is the first message.

    An error that a message causes (too long, refused by the template) is printed as one sentence, and the message is
    removed.
    """
    conversation = Conversation(system)
    if sys.stdin.isatty():
        report.line("/help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation")
    while True:
        try:
            message = first if first is not None else read_message(report)
        except KeyboardInterrupt:
            report.line()
            return 130
        if message is None:
            return 0
        command = None if first is not None else re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", message.strip())
        first = None
        try:
            if command:
                if not _obey(command[1], (command[2] or "").strip(), conversation, report):
                    return 0
            elif message.strip():
                _exchange(llm, template, ask, report, conversation, message)
        except EngineError as error:
            report.line(f"error: {error}")


def _exchange(
    llm: "LLM", template: "ChatTemplate", ask: Ask, report: Report, conversation: Conversation, message: str
) -> None:
    conversation.add("user", message)
    try:
        reply = ask(conversation.prompt(template))
    except BaseException as error:
        conversation.messages.pop()
        if isinstance(error, ContextError) and len(conversation.messages) > 1:
            raise EngineError(f"{str(error).rstrip('.')}; /clear starts a new conversation") from error
        raise
    generation = reply.generation
    conversation.answered(generation, llm.detokenize(generation.ids))
    if not sys.stdout.isatty() and not generation.text.endswith("\n"):
        sys.stdout.write("\n")  # separates the answers in a file
    if reply.reread is not None:
        report.line(f"note: {reply.reread}")
    report.turn(generation, reason=reply.reason, n_ctx=llm.n_ctx)


def _obey(command: str, argument: str, conversation: Conversation, report: Report) -> bool:
    """Runs one command of the chat; False if it ends the chat."""
    if command in ("quit", "exit", "bye"):
        return False
    if command == "help":
        for line in HELP.splitlines():
            report.line(line)
    elif command == "clear":
        conversation.clear()
        report.line("a new conversation")
    elif command == "save":
        report.line(f"saved to {conversation.save(argument)}")
    else:
        report.line(f"there is no command /{command}: /help lists them")
    return True


def read_message(report: Report) -> str | None:
    """One message from the keyboard or from stdin; None at the end of the input."""
    line = _read_line(report, "> ")
    if line is None:
        return None
    if line.startswith('"""'):
        return _read_block(report, line[3:])
    lines = []
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1])
        line = _read_line(report, ". ")
    return "\n".join([*lines, line or ""])


def _read_block(report: Report, line: str | None) -> str:
    lines: list[str] = []
    while line is not None:
        if line.rstrip().endswith('"""'):
            lines.append(line.rstrip()[:-3])
            break
        lines.append(line)
        line = _read_line(report, ". ")
    # The marks may be on lines of their own.
    return "\n".join(lines).strip("\n")


def _read_line(report: Report, prompt: str) -> str | None:
    report.close()
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            import readline  # noqa: F401  (gives input() its line editing and history)
        except ImportError:
            pass
        try:
            return input(prompt)
        except EOFError:
            report.line()
            return None
    # input() would write its prompt to stdout, which is a file or a pipe here.
    if sys.stdin.isatty():
        report.stream.write(prompt)
        report.stream.flush()
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None
