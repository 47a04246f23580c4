"""Reading messages from a keyboard: editing, history, completion, and what is typed while an answer is written."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.history import History
from prompt_toolkit.input import Input, create_input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output, create_output

from engine.cli.lines import is_open, unquoted
from engine.cli.report import Report

Completions = Callable[[str], Iterable[tuple[str, str, str]]]
"""From the text before the cursor to the part to replace, its replacement, and its meaning."""


class Keyboard:
    """Reads messages on a terminal; ``interactive`` is True because a person can be asked."""

    interactive = True

    def __init__(
        self,
        report: Report,
        history: History,
        completions: Completions,
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self.report = report
        self.input = input if input is not None else create_input(sys.stdin)
        # A file or a pipe gets the answer only.
        screen = sys.stdout if sys.stdout.isatty() else sys.stderr
        self.output = output if output is not None else create_output(screen)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation=". ",
            key_bindings=editing_keys(),
            history=history,
            completer=CommandCompleter(completions),
            # The menu takes lines below the prompt, so only commands get one.
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            reserve_space_for_menu=6,
            enable_suspend=True,
            enable_open_in_editor=True,
            input=self.input,
            output=self.output,
        )

    def read(self, default: str = "") -> str | None:
        """One message, which begins as ``default``; None after Ctrl-D. Raises KeyboardInterrupt for Ctrl-C without text."""
        self.report.close()
        waiting = self._typed()
        store_typeahead(self.input, waiting)
        if default and waiting:
            self._session.history.append_string(default)
            self.report.line("what you typed meanwhile is below; Up shows the message before it")
        elif default:
            self.report.line("your message is below, to be edited; Ctrl-C clears it")
        try:
            # What was typed meanwhile is another message; the history has this one.
            text = self._session.prompt(default="" if waiting else default)
        except EOFError:
            return None
        # Bytes that are not UTF-8 arrive as surrogates.
        return unquoted(text.encode("utf-8", "replace").decode("utf-8"))

    def confirm(self, question: str) -> bool:
        """Whether the answer is "yes", in full and with Enter.  Keys typed before the question do not answer it, and a line
        that is no answer is not lost: both wait for the next prompt."""
        waiting, answer = self._typed(), "y"
        self.report.line(question)
        session: PromptSession[str] = PromptSession(
            "type yes or no and press Enter: ", input=self.input, output=self.output
        )
        try:
            while answer == "y":  # it may be a part of something else
                typed = session.prompt()
                answer = typed.strip().lower()
        except (KeyboardInterrupt, EOFError):
            typed = answer = ""
        # As a paste, which does not send it.
        kept = [] if answer in ("yes", "no", "n", "") else [KeyPress(Keys.BracketedPaste, typed)]
        store_typeahead(self.input, [*waiting, *kept, *self._typed()])
        return answer == "yes"

    @contextmanager
    def away(self) -> Iterator[None]:
        """A context in which nothing is read: what is typed is not shown, and waits for the next prompt."""
        with quiet():
            # A paste stays one message. A prompt turns this off at its end.
            self.output.enable_bracketed_paste()
            self.output.flush()
            try:
                yield
            finally:
                self.output.disable_bracketed_paste()
                self.output.flush()

    def _typed(self) -> list[KeyPress]:
        """The keys that have been typed and not been read."""
        keys = get_typeahead(self.input)
        while more := self.input.read_keys():
            keys += more
        return [key for key in keys if key.key != Keys.CPRResponse]


@contextmanager
def quiet() -> Iterator[None]:
    """Makes the terminal neither show what is typed nor wait for the end of a line; Ctrl-C still interrupts. Does nothing on
    Windows."""
    try:
        import termios
    except ImportError:
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    silent = [*before]
    # Ctrl-C must not throw away what was typed.
    silent[3] = silent[3] & ~(termios.ECHO | termios.ICANON) | termios.ISIG | termios.NOFLSH
    termios.tcsetattr(fd, termios.TCSANOW, silent)
    # A shell sets its own modes after Ctrl-Z.
    other = signal.signal(signal.SIGCONT, lambda *_: termios.tcsetattr(fd, termios.TCSANOW, silent))
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, other)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class CommandCompleter(Completer):
    """Completes commands, their settings, and the names of their files."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._paths = PathCompleter(expanduser=True)
        self._models = PathCompleter(
            expanduser=True, file_filter=lambda path: os.path.isdir(path) or path.lower().endswith(".gguf")
        )

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        """The completions of the text before the cursor; none for a message."""
        text = document.text_before_cursor
        if text.startswith(("/save ", "/load ", "/read ", "/model ")):
            paths = self._models if text.startswith("/model ") else self._paths
            yield from paths.get_completions(Document(text.partition(" ")[2].lstrip()), event)
        for part, whole, meaning in self._completions(text):
            yield Completion(whole, -len(part), display_meta=meaning)


def editing_keys() -> KeyBindings:
    """The keys that differ from those of prompt_toolkit."""
    keys = KeyBindings()
    writing = has_focus(DEFAULT_BUFFER)  # not the search for an earlier message

    @keys.add("enter", filter=writing)
    def _(event: KeyPressEvent) -> None:
        buffer: Buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=writing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", filter=writing)
    @keys.add("<sigint>", filter=writing)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys
