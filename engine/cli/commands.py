"""The commands of a chat, which begin with a slash."""

import difflib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.cli import saved, settings
from engine.cli.parser import listed
from engine.cli.report import name_of
from engine.cli.session import Session
from engine.cli.texts import read_text
from engine.errors import ContextError, DeviceError, UsageError
from engine.hub.catalog import CATALOG, CatalogEntry, is_present
from engine.hub.resolve import resolve

KEYS = """\
Enter sends the message; Alt-Enter begins a new line, and so does Enter after \\ or within triple quotes.
Begin a message with // to send a message that begins with a slash.
Ctrl-C ends an answer, or clears the message; Ctrl-R searches earlier messages; Ctrl-D ends the chat."""

PREVIEW = 50
"""Characters of a message that /tokens shows."""


@dataclass(frozen=True)
class Command:
    """One command: its argument as the help shows it ("" if it takes none), and what it does."""

    argument: str
    meaning: str
    run: Callable[[Session, str], None]
    needs_template: bool = False


class Quit(Exception):
    """The chat ends."""


def parse(typed: str) -> tuple[str, str] | None:
    """The name of a command and what follows it; None for a message.  The name is "" for a word such as ``exit``."""
    if typed.rstrip() in LEAVING:
        return "", typed.rstrip()
    match = re.fullmatch(r"/(\?|[A-Za-z][\w-]*!?)(?:\s+(.*))?", typed.strip(), re.DOTALL)
    return (match[1].lower(), (match[2] or "").strip()) if match else None


def message_of(typed: str) -> str:
    """The message to send for a typed text: a leading double slash becomes a single one."""
    return typed[1:] if typed.startswith("//") else typed


def obey(session: Session, name: str, argument: str) -> None:
    """Runs a command; raises UsageError, other errors of the engine, or Quit."""
    if not name:
        session.report.line(
            f"to end the chat, enter /quit or press Ctrl-D (a space before {argument} sends it as a message)"
        )
        return
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        near = dict.fromkeys([each for each in COMMANDS if each.startswith(name)])
        near |= dict.fromkeys(difflib.get_close_matches(name, COMMANDS, n=3))
        hint = f"did you mean {listed(f'/{each}' for each in near)}?" if near else "/help lists them"
        raise UsageError(f"there is no command /{name}: {hint} (write // to begin a message with a slash)")
    command = COMMANDS[name]
    if argument and not command.argument:
        raise UsageError(f"/{name} takes no argument (write // to begin a message with a slash)")
    if command.needs_template and session.template is None:
        raise UsageError(f"/{name} is for conversations, and without a chat template there is none")
    command.run(session, argument)


def completions(text: str) -> Iterator[tuple[str, str, str]]:
    """Completions of the beginning of a command: the part to replace, its replacement, and its meaning."""
    if match := re.fullmatch(r"/([a-z]*)", text):
        yield from ((match[1], name, each.meaning) for name, each in COMMANDS.items() if name.startswith(match[1]))
    elif match := re.fullmatch(r"/model\s+(\S*)", text):
        yield from ((match[1], name, _about(model)) for name, model in CATALOG.items() if name.startswith(match[1]))
    elif match := re.fullmatch(r"/set\s+([\w-]*)", text):
        names = {name: settings.meaning(name) for name in settings.actions()} | {"system": COMMANDS["system"].meaning}
        yield from ((match[1], name, what) for name, what in names.items() if name.startswith(match[1]))


def _help(session: Session, argument: str) -> None:
    for name, command in COMMANDS.items():
        if command.needs_template and session.template is None:
            continue
        session.report.line(f"{f'/{name} {command.argument}':<20} {command.meaning}")
    for line in KEYS.splitlines():
        session.report.line(line)


def _set(session: Session, argument: str) -> None:
    name, text = (*argument.split(None, 1), "", "")[:2]
    if name == "system":
        if session.template is None:
            raise UsageError("the system prompt is for conversations, and without a chat template there is none")
        _system(session, text)
        return
    names = [settings.find(name)] if name else [*settings.actions()]
    if text:
        session.settings = session.settings.parsed(names[0], text)
    values = [session.settings.shown(each) for each in names]
    widths = max(map(len, names)), max(map(len, values))
    for each, value in zip(names, values, strict=True):
        meaning = "" if name else settings.meaning(each)
        session.report.line(f"{each:<{widths[0]}}  {value:<{widths[1]}}  {meaning}".rstrip())
    if not name and session.template is not None:
        _system(session, "")


def _system(session: Session, argument: str) -> None:
    conversation = session.conversation
    if argument:
        conversation.system = None if argument == "-" else argument
    if conversation.system is None:
        session.report.line("no system prompt")
    else:
        session.report.line(f"system prompt: {conversation.system}")


def _regen(session: Session, argument: str) -> None:
    session.regenerate()


def _undo(session: Session, argument: str) -> None:
    session.undo()
    session.report.line("the last message and its answer were removed")


def _clear(session: Session, argument: str) -> None:
    session.conversation.clear()
    session.attached.clear()
    session.file = None
    session.report.line("started a new conversation")


def _used(session: Session) -> int:
    """The number of tokens of the conversation, with those that the template adds."""
    conversation, template = session.conversation, session.template
    if template is None or not conversation.messages:
        return 0
    text = template.render(conversation.messages, add_generation_prompt=False)
    return len(template.encode(conversation.messages, add_generation_prompt=False, known=conversation.known(text)))


def _context(session: Session) -> str:
    used, n_ctx = _used(session), session.llm.n_ctx
    return f"context: {used} of {n_ctx} tokens used, {max(n_ctx - used, 0)} free"


def _tokens(session: Session, argument: str) -> None:
    conversation, llm, report = session.conversation, session.llm, session.report
    used = _used(session)
    report.line(_context(session))
    counts = [len(llm.tokenize(message["content"], special=False)) for message in conversation.messages]
    for message, count in zip(conversation.messages, counts, strict=True):
        line = " ".join(message["content"].split())
        preview = line if len(line) <= PREVIEW else line[:PREVIEW] + "…"
        report.line(f"{count:>7}  {message['role']:<9}  {preview}")
    if used > sum(counts):
        report.line(f"{used - sum(counts):>7}  added by the chat template")


def _save(session: Session, argument: str) -> None:
    name = argument or (str(session.file) if session.file is not None else time.strftime("chat-%Y%m%d-%H%M%S.json"))
    path = saved.path_of(name)
    messages = session.conversation.messages
    saved.write(path, messages, session.settings.as_json(), replace=path in session.files)
    session.file = path
    session.files.add(path)
    session.report.line(f"{len(messages)} messages and the settings were saved to {path}")


def _load(session: Session, argument: str) -> None:
    if not argument:
        raise UsageError("/load needs the name of a file: give one that /save has written")
    path = saved.path_of(argument)
    system, turns, values = saved.read(path)
    try:
        session.settings = session.settings.from_json(values)
    except UsageError as error:
        raise UsageError(f"{path} is not a conversation: {error}") from error
    session.conversation.replace(system, turns)
    session.file = path
    session.files.add(path)
    count, used, n_ctx = len(session.conversation.messages), _used(session), session.llm.n_ctx
    session.report.line(
        f"{count} messages were loaded from {path}: {used} of {n_ctx} tokens, answered by {name_of(session.llm)}"
    )


def _read(session: Session, argument: str) -> None:
    if not argument:
        raise UsageError("/read needs the name of a text file: its text comes before your next message")
    path = saved.path_of(argument)
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    if path.stat().st_size > saved.MOST_BYTES:
        raise UsageError(f"{path} is too large to be read: the limit is {saved.MOST_BYTES >> 20} MiB")
    text = read_text(str(path), "text")
    session.attached.append(text)
    count = len(session.llm.tokenize(text, special=False))
    session.report.line(f"the text of {path} ({count} tokens) comes before your next message; /clear forgets it")


def _model(session: Session, argument: str) -> None:
    llm, report = session.llm, session.report
    if not argument:
        report.line(f"{name_of(llm)}  {llm.path}, context {llm.n_ctx} tokens")
        return
    path = resolve(argument, report.progress)
    if path.samefile(llm.path):
        raise UsageError(f"{argument} is the model that is open")
    try:
        session.open(path)
    except (ContextError, DeviceError, MemoryError) as error:
        why = str(error).rstrip(".") or "not enough memory"
        raise UsageError(
            f"{why} ({name_of(llm)} stays open and uses memory, too: to open only {argument}, end the chat and give -m)"
        ) from error
    count = len(session.conversation.messages)
    if session.template is not None and count:
        report.line(f"the {count} messages of the conversation will be read again with your next message")


def _about(model: CatalogEntry) -> str:
    return model.description + ("" if is_present(model) else f", a download of {model.n_bytes / 1e6:.0f} MB")


def _show(session: Session, argument: str) -> None:
    session.report.started(session.llm)
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    session.report.line("sampling: " + ", ".join(f"{name} {session.settings.shown(name)}" for name in names))
    if session.template is not None:
        _system(session, "")
        session.report.line(_context(session))


def _quit(session: Session, argument: str) -> None:
    raise Quit


COMMANDS = {
    "help": Command("", "list the commands; /? does the same", _help),
    "set": Command("[NAME [VALUE]]", "show all settings or one of them, or change one", _set),
    "system": Command("[TEXT]", "show or change the system prompt; - removes it", _system, True),
    "regen": Command("", "discard the last answer and generate another one", _regen),
    "undo": Command("", "remove the last message and its answer, and edit the message", _undo),
    "clear": Command("", "forget the conversation, but not the system prompt", _clear, True),
    "tokens": Command("", "count the tokens of the context and of each message", _tokens, True),
    "read": Command("FILE", "put the text of a file before the next message", _read, True),
    "model": Command("[NAME]", "show which model is open, or open another one and keep the conversation", _model),
    "show": Command("", "show the model, sampling, the system prompt and the use of the context", _show),
    "save": Command("[FILE]", "write the conversation and the settings to a JSON file", _save, True),
    "load": Command("FILE", "continue a saved conversation", _load, True),
    "quit": Command("", "end the chat; Ctrl-D does the same", _quit),
}
"""Every command by its name, in the order in which /help lists them."""

ALIASES = {"?": "help", "exit": "quit", "bye": "quit", "q": "quit"}

LEAVING = ("exit", "quit", "bye", ":q", ":q!", ":wq", ":x")
"""Words that end other programs: a message of one of them alone says how to end the chat."""
