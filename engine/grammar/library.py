"""llguidance, the library that computes which tokens a grammar permits: imported on first use, and limited."""

from types import ModuleType

from engine.errors import UsageError

LIMITS = {
    # Ambiguous grammars take time with the cube of it: 600 are 40 ms, or an object with 150 optional properties.
    "max_items_in_row": 600,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    # Such work has no limit of its own; without it, all of it belongs to the masks.
    "precompute_large_lexemes": False,
    # Verbose errors quote the whole grammar.
    "verbose_errors": False,
}
"""The limits of one answer's grammar, arguments of ``llguidance.LLParserLimits``.  They bound each mask, to 50 ms at worst,
and memory: a lexer state takes 1 to 2 kB."""


def llguidance() -> ModuleType:
    """The package.  Raises UsageError if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            "grammars and schemas need the package llguidance: install it with pip install 'bitmirror[serve]'."
        ) from error
    return llguidance
