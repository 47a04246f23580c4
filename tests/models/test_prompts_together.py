"""Passes that read prompts of several sequences: whatever is read together, each sequence has the logits that it has alone,
and so has all that is stored for later passes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from tests.models.test_mixed_passes import KINDS, drafts, files, read, stored
from tests.tiers import examples

SLOTS = 4
TOGETHER = [name for name in KINDS if name != "deepseek4"]

LENGTHS = st.lists(
    st.one_of(st.integers(1, 40), st.integers(60, 70), st.integers(100, 200)), min_size=SLOTS, max_size=SLOTS
)
"""Of the prompts: within a page, at the end of one, and more than the most rows of a pass."""


@st.composite
def packings(draw: st.DrawFn, lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Passes, each with slots and the numbers of their next tokens, that read prompts of these lengths."""
    left, passes = list(lengths), []
    while any(left):
        slots = draw(st.permutations([i for i, n in enumerate(left) if n]))
        room, parts = draw(st.integers(2, 128)), []
        for slot in slots[: draw(st.integers(1, len(slots)))]:
            count = min(left[slot], draw(st.integers(1, room)) if slot != slots[0] else room)
            parts.append((slot, count))
            left[slot], room = left[slot] - count, room - count
            if not room:
                break
        passes.append(parts)
    return passes


def read_together(model: Any, texts: list[np.ndarray], passes: list[list[tuple[int, int]]]) -> dict[int, np.ndarray]:
    """The logits after each text, of which passes read slices."""
    found = dict[int, np.ndarray]()
    for parts in passes:
        given = []
        for slot, count in parts:
            at = model.sequences[slot].length
            given.append((model.sequences[slot], texts[slot][at : at + count].tolist()))
        wanted = [sequence.length + len(tokens) == texts[sequence.slot].size for sequence, tokens in given]
        passing = model.split_together(given, wanted)
        passing.advance(passing.pieces)
        logits = passing.logits(True)
        for sequence, tokens in given:
            sequence.commit(tokens)
        ended = [sequence.slot for (sequence, _), ends in zip(given, wanted, strict=True) if ends]
        assert (0 if logits is None else len(logits)) == len(ended)
        found.update(zip(ended, [] if logits is None else logits, strict=True))
    return found


@pytest.mark.parametrize("name", TOGETHER)
def test_any_packing_gives_the_bits_of_each_prompt_alone(name: str, tmp_path: Path) -> None:
    given_files = files(name, tmp_path)
    alone, several = engine.load(**given_files, n_threads=1), engine.load(**given_files, n_threads=2, parallel=SLOTS)
    one: Any = alone.model
    model: Any = several.model
    assert model.reads_together

    @examples(3)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        lengths = data.draw(LENGTHS)
        passes = data.draw(packings(lengths))
        rng = np.random.default_rng(sum(lengths))
        texts = [rng.integers(0, several.config.n_vocab - 3, n).astype(np.int32) for n in lengths]
        several.reset()
        for sequence in model.sequences:
            sequence.truncate(0)
        found = read_together(model, texts, passes)
        for slot, text in enumerate(texts):
            alone.reset()
            expected = read(one, one.sequence, text)
            sequence = model.sequences[slot]
            assert sequence.length == text.size and sequence.tokens == text.tolist()
            assert found[slot].tobytes() == expected[-1].tobytes()
            assert stored(model, sequence) == stored(one, one.sequence)
            assert drafts(model, sequence, 5) == drafts(one, one.sequence, 5)

    check()
