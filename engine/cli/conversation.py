"""A conversation: its messages, and the token ids that they have had so far."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.decode.generation import Generation
    from engine.text.template.chat import ChatTemplate

Message = dict[str, str]
"""What a chat template takes: ``{"role": ..., "content": ...}``."""


class Conversation:
    """Alternating messages of a user and a model, after a system prompt if there is one.

    Attributes: ``system`` (None without a system prompt) and ``turns``, the messages after it.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Message] = []
        #: The text of the latest prompt.
        self._asked = ""
        #: The latest prompt and its answer, as text and as ids, and the characters and ids up to the end of each answer.
        self._text = ""
        self._ids: list[int] = []
        self._ends: list[tuple[int, int, list[Message]]] = []

    @property
    def messages(self) -> list[Message]:
        """All messages, with the system prompt."""
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    def clear(self) -> None:
        """Removes all messages except the system prompt."""
        self.replace(self.system, [])

    def replace(self, system: str | None, turns: list[Message]) -> None:
        """Replaces the whole conversation."""
        self.system, self.turns = system, turns
        self.forget_ids()

    def forget_ids(self) -> None:
        """Forgets the token ids of prompts and answers, but not the messages, because another model reads them."""
        self._asked, self._text, self._ids, self._ends = "", "", [], []

    def add(self, role: str, content: str) -> None:
        """Appends one message."""
        self.turns.append({"role": role, "content": content})

    def prompt(self, template: "ChatTemplate") -> list[int]:
        """The token ids to answer; earlier prompts and answers keep the ids they had, so that they need not be read again."""
        self._asked = template.render(self.messages)
        return template.encode(self.messages, known=self.known(self._asked))

    def known(self, text: str) -> tuple[str, list[int]] | None:
        """The longest part of prompts and answers so far that ``text`` begins with, and the ids it had."""
        for n_text, n_ids, messages in reversed(self._ends):
            # Text alone does not tell what a template wrote from what a user wrote, which must not become a control token.
            if self.messages[: len(messages)] == messages and text.startswith(self._text[:n_text]):
                return self._text[:n_text], self._ids[:n_ids]
        return None

    def answered(self, generation: "Generation", text: str, begun: str = "") -> None:
        """Records the answer to the latest prompt.

        text: what the ids of the answer stand for. begun: the part of the answer that the prompt ended with.
        """
        self.add("assistant", begun + generation.text)
        asked = self._asked + begun
        ends = [end for end in self._ends if asked.startswith(self._text[: end[0]])]
        self._text, self._ids = asked + text, [*generation.prompt_ids, *generation.ids]
        # A stop text is cut off, and an incomplete character is not shown: then the ids hold more than the conversation.
        whole = text == generation.text and text != ""
        self._ends = [*ends, (len(self._text), len(self._ids), list(self.messages))] if whole else ends

    def undo(self) -> str:
        """Removes the last message of the user and its answer, and returns that message."""
        message = self.turns[-2]["content"]
        del self.turns[-2:]
        return message

    # -- making room: the first message and its answer stay, and so does the last message

    @property
    def n_droppable(self) -> int:
        """The number of messages between the first answer and the last message of the user."""
        last = len(self.turns) - (1 if self.turns and self.turns[-1]["role"] == "user" else 2)
        return max(last - 2, 0)

    def without(self, n: int) -> list[Message]:
        """All messages except the ``n`` oldest after the first answer."""
        first = len(self.messages) - len(self.turns) + 2
        return self.messages[:first] + self.messages[first + n :]

    def drop(self, n: int) -> None:
        """Removes the ``n`` oldest messages after the first answer."""
        del self.turns[2 : 2 + n]
