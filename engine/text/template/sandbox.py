"""The only place where chat templates are compiled and run: a Jinja sandbox with limits on everything.

A template comes with a model file, so it is an untrusted program. Jinja's ``ImmutableSandboxedEnvironment`` keeps it
away from Python; it could still run forever, fill the memory, or present what a user wrote as its own text.
So this environment sees every step of a template (an iteration, a call, an operator, an attribute, a filter, an
output) and every value it makes, counts both, and refuses an operation before it makes something too large.
Text of the template itself is marked (:mod:`engine.text.template.marked`); text from outside is not.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial, wraps
from string import Formatter
from typing import Any, NoReturn, TypeAlias

from jinja2 import filters, nodes, pass_context
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.runtime import Context
from jinja2.utils import Namespace

from engine.errors import TemplateError
from engine.text.template.budget import VIEWS, Budget
from engine.text.template.code import GenerationTag, LiteralEnvironment, TemplateGenerator
from engine.text.template.marked import HTMLText, MarkedText, escaped, joined, marked, marks_of, trusted

MAX_SOURCE = 64 * 1024  # characters of a template
MAX_RANGE = 10_000
MAX_BITS = 4096  # size of an integer

TemplateValue: TypeAlias = Any
"""A value of a template, whose type only the template knows."""

# The methods of Python's own types that a template may use, and the filters of Jinja that are used unchanged.
_STR_METHODS = """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind
    rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
_METHODS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((str, MarkedText, HTMLText), _STR_METHODS),
    ((dict,), "get items keys values"),
    ((list, tuple), "count index"),
    ((int, float, bool, range, *VIEWS), ""),
)
_ALLOWED = {kind: frozenset(names.split()) for kinds, names in _METHODS for kind in kinds}
_FILTERS = """
    abs capitalize count d default dictsort first float groupby int items last length list lower map max min reject
    rejectattr reverse select selectattr sort title unique upper
"""
_OWN_FILTERS = "escape indent join replace round safe string sum tojson trim"
_DATE = re.compile(r"([^%]|%-?[A-DF-NP-Za-z%]){0,100}")  # no width and no prefix: a directive writes a few words


class _Namespace(Namespace):
    """``namespace()``; Jinja's own prints its contents, which may include itself."""

    def __repr__(self) -> str:
        return "<namespace>"


class TemplateEnvironment(LiteralEnvironment):
    code_generator_class = TemplateGenerator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing may be computed while compiling, where nothing is counted
            finalize=pass_context(lambda context, value: self.text(value)),
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self.literals = []
        self.filters = {name: self._counted(filters.FILTERS[name]) for name in _FILTERS.split()}
        self.filters |= {name: self._counted(getattr(self, f"_filter_{name}")) for name in _OWN_FILTERS.split()}
        self.filters["e"] = self.filters["escape"]
        self.globals = {
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "range": _range,
            "strftime_now": _strftime_now,
        }
        self.budget = Budget()

    # --- what compiled templates call --------------------------------------------------------------------------

    def tick(self) -> None:
        """Counts one iteration of a loop."""
        self.budget.tick()

    def made(self, value: TemplateValue) -> TemplateValue:
        """Counts a list, tuple or mapping literal of the template."""
        return self.budget.made(value)

    def text(self, value: TemplateValue) -> str:
        """``value`` as it is printed."""
        self.budget.tick()
        if isinstance(value, str):
            return value
        self.budget.refuse_over(self.budget.size(value))
        return str(self.budget.made(str(value)))

    def concat(self, parts: Iterable[str]) -> MarkedText:
        """Joins the output of a template, macro or block."""
        return self.budget.made(joined(self._limited(parts)))  # type: ignore[no-any-return]

    def _limited(self, parts: Iterable[str]) -> Iterator[str]:
        size = 0
        for part in parts:
            size += 1 + len(part)
            self.budget.refuse_over(size)
            yield part

    def getattr(self, obj: TemplateValue, attribute: str) -> TemplateValue:
        self.budget.tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: TemplateValue, argument: TemplateValue) -> TemplateValue:
        self.budget.tick()
        item = super().getitem(obj, argument)
        return self.budget.made(item) if isinstance(argument, slice) else item

    def is_safe_attribute(self, obj: TemplateValue, attr: str, value: TemplateValue) -> bool:
        if isinstance(obj, type):
            return False  # dict.update(d, ...) would change a value behind the back of the budget
        allowed = _ALLOWED.get(type(obj))
        return super().is_safe_attribute(obj, attr, value) if allowed is None else attr in allowed

    def wrap_str_format(self, value: TemplateValue) -> Callable[..., str] | None:
        if getattr(value, "__name__", "") != "format" or not isinstance(text := getattr(value, "__self__", None), str):
            return None
        return lambda *args, **kwargs: self.concat(self._formatted(text, args, kwargs))

    def _formatted(self, text: str, args: tuple[TemplateValue, ...], kwargs: dict[str, TemplateValue]) -> Iterator[str]:
        """The parts of ``text.format(*args, **kwargs)``; a field is an argument as it is printed, with its marks."""
        own = str if 0 in marks_of(text) else trusted
        number = 0
        for literal, field, spec, conversion in Formatter().parse(text):
            yield own(literal)
            if field is None:
                continue
            if spec or conversion or not re.fullmatch(r"\w*", field):
                raise TemplateError("the chat template uses format() with more than plain fields: {}, {0} or {name}")
            if field.isdecimal() or not field:
                yield self.text(args[int(field or number)])
                number += 1
            else:
                yield self.text(kwargs[field])

    def call(
        __self, __context: Context, __obj: TemplateValue, *args: TemplateValue, **kwargs: TemplateValue
    ) -> TemplateValue:
        self = __self
        self.budget.tick()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            args = self._checked_arguments(__obj.__name__, text, *args)
        return self.budget.made(super().call(__context, __obj, *args, **kwargs))

    def _checked_arguments(self, method: str, text: str, *args: TemplateValue) -> tuple[TemplateValue, ...]:
        """``args`` for a method of ``text``, after checking that the result and the work are not too large."""
        if method == "join" and args:
            parts = list(self._limited(args[0]))
            self.budget.refuse_over(len(text) * len(parts))
            return (parts, *args[1:])
        if method == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
            self.budget.refuse_over(len(text) + text.count(args[0]) * len(args[1]))
        elif method != "replace":
            # Stripping, and searching backwards, may compare every character with every other.
            longest = max((len(arg) for arg in args if isinstance(arg, (str, tuple))), default=0)
            self.budget.refuse_over(len(text) * longest // 100)
        return args

    def call_binop(
        self, context: Context | None, operator: str, left: TemplateValue, right: TemplateValue
    ) -> TemplateValue:
        self.budget.tick()
        if operator == "+":
            self.budget.refuse_over(self.budget.size(left) + self.budget.size(right))
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            number, value = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(value, (str, list, tuple)):
                self.budget.refuse_over(number * self.budget.size(value))
        if operator == "%" and isinstance(left, str):
            raise TemplateError(
                "the chat template formats text by %, which is not allowed: format() or ~ can replace it"
            )
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateError("the chat template computes with numbers that are far too large")
        return self.budget.made(self.binop_table[operator](left, right))

    # --- filters -----------------------------------------------------------------------------------------------

    def _counted(self, function: Callable[..., TemplateValue]) -> Callable[..., TemplateValue]:
        @wraps(function)
        def counted(*args: TemplateValue, **kwargs: TemplateValue) -> TemplateValue:
            self.budget.tick()
            return self.budget.made(function(*args, **kwargs))

        return counted

    def _filter_escape(self, value: TemplateValue) -> str:
        return escaped(self.text(value))

    def _filter_indent(
        self, value: TemplateValue, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text = self.text(value)
        n = width if isinstance(width, int) else len(width)
        self.budget.refuse_over(len(text) + n * (1 + len(text.splitlines())))
        return filters.do_indent(text, width, first, blank)

    def _filter_join(self, value: TemplateValue, d: TemplateValue = "", attribute: str | int | None = None) -> str:
        parts = value if attribute is None else map(filters.make_attrgetter(self, attribute), value)
        texts = list(self._limited(map(self.text, parts)))
        separator = self.text(d)
        self.budget.refuse_over(len(separator) * len(texts))
        return marked(separator).join(texts)

    def _filter_replace(self, value: TemplateValue, old: TemplateValue, new: TemplateValue, count: int = -1) -> str:
        text, old, new = self.text(value), self.text(old), self.text(new)
        self._checked_arguments("replace", text, old, new)
        return marked(text).replace(old, new, -1 if count is None else count)

    def _filter_round(self, value: TemplateValue, precision: int = 0, method: str = "common") -> TemplateValue:
        if not -30 <= precision <= 30:
            raise TemplateError("the chat template rounds to an excessive number of digits")
        return filters.do_round(value, precision, method)  # type: ignore[arg-type]

    def _filter_safe(self, value: TemplateValue) -> str:
        text = self.text(value)
        return HTMLText(text, marks_of(text))

    def _filter_string(self, value: TemplateValue) -> str:
        return self.text(value)

    def _filter_sum(
        self, value: TemplateValue, attribute: str | int | None = None, start: TemplateValue = 0
    ) -> TemplateValue:
        for part in value if attribute is None else map(filters.make_attrgetter(self, attribute), value):
            start = self.call_binop(None, "+", start, part)
        return start

    def _filter_tojson(
        self,
        value: TemplateValue,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON that is not escaped for HTML, as in ``transformers``."""
        self.budget.refuse_over(self.budget.size(value))
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
            raise TemplateError("the chat template indents JSON by an excessive width")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return "".join(self._limited(encoder.iterencode(value)))

    def _filter_trim(self, value: TemplateValue, chars: str | None = None) -> str:
        text = self.text(value)
        return text.strip(*self._checked_arguments("strip", text, chars))


def _raise_exception(message: TemplateValue) -> NoReturn:
    raise TemplateError(f"the chat template refuses these messages: {_shown(message)}")


def _range(*bounds: int) -> range:
    values = range(*bounds)
    if len(values) > MAX_RANGE:
        raise TemplateError(f"the chat template counts over a range of more than {MAX_RANGE}")
    return values


def _strftime_now(format: str) -> str:
    if not _DATE.fullmatch(format):
        raise TemplateError("the chat template asks for the date in an unreasonable format")
    return datetime.now().strftime(format)


class Template:
    """A compiled chat template; raises TemplateError where it cannot be compiled."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters, more than the {MAX_SOURCE} allowed")
        self._environment = TemplateEnvironment()
        self._template = _guarded(partial(self._compile, source))

    def _compile(self, source: str) -> TemplateValue:
        tree = self._environment.parse(source)
        refused = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.ScopedEvalContextModifier)
        for node in tree.find_all(refused):
            name = type(node).__name__
            raise TemplateError(f"the chat template uses {name} (line {node.lineno}), which is not allowed")
        return self._environment.from_string(tree)

    def render(self, values: Mapping[str, TemplateValue], n_values: int, n_characters: int) -> MarkedText:
        """The text for ``values``; their size (the number of values and of characters) sets the limits."""
        self._environment.budget = Budget(n_values, n_characters)
        text: MarkedText = _guarded(lambda: self._environment.concat(self._run(values)))
        return text

    def _run(self, values: Mapping[str, TemplateValue]) -> Iterator[str]:
        yield from self._template.root_render_func(self._template.new_context(values))


def _guarded(action: Callable[[], TemplateValue]) -> TemplateValue:
    """Runs a step of a template, and turns whatever it raises into a TemplateError with one sentence."""
    try:
        return action()
    except TemplateError:
        raise
    except RecursionError:
        raise TemplateError("the chat template is nested too deeply: it is broken or hostile") from None
    except JinjaError as error:
        lineno = getattr(error, "lineno", None)
        line = f" (line {lineno})" if lineno else ""
        raise TemplateError(f"the chat template fails{line}: {_shown(error.message)}") from error
    except Exception as error:
        raise TemplateError(f"the chat template fails: {type(error).__name__}: {_shown(error)}") from error


def _shown(message: TemplateValue) -> str:
    """A message of a template, made safe to print on a terminal."""
    return "".join(symbol if symbol.isprintable() else " " for symbol in str(message)[:500])
