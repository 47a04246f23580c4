"""A server under load loses no page, and gives no status that it must not give."""

import pytest

pytest.importorskip("uvicorn")

from benchmarks import serving_load


@pytest.mark.thorough
def test_the_script_reports_no_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serving_load, "TIDY_SECONDS", 1.5)  # pages are checked after one second
    assert serving_load.main(["--requests", "60", "--connections", "20", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "statuses 200:" in printed and "p99" in printed and "pages in use" in printed
