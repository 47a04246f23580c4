"""The benchmark of prompts of new lengths, with a small model on the CPU."""

from typing import Any

import pytest

from benchmarks import new_lengths


def test_each_length_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    new_lengths.main(["pycoder", "--lengths", "9,12", "--device", "cpu"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [row[0].strip() for row in rows] == ["tokens", "---:", "9", "12"]
    assert all(len(row) == 1 + new_lengths.TIMES for row in rows) and float(rows[2][1]) > 0


def test_bits_that_differ_are_an_error() -> None:
    class Drifting:
        class config:
            n_vocab = 10

        read = 0

        def reset(self) -> None:
            self.read += 1

        def prefill(self, ids: list[int]) -> Any:
            return [[float(self.read)]]

    llm: Any = Drifting()
    with pytest.raises(SystemExit, match="prompts of 6 tokens give different bits"):
        new_lengths.rates(llm, 9)
    assert llm.read == new_lengths.OTHER + new_lengths.TIMES + 1
