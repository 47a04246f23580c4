"""The table of the speed of formats; what it measures takes minutes."""

from benchmarks.formats import N_COLUMNS, N_ROWS, Speed, names, table


def test_the_table_compares_with_q4_k() -> None:
    n = N_ROWS * N_COLUMNS
    lines = table([Speed("Q4_K", n * 9 // 16, 20.0, 300.0), Speed("Q8_0", n * 17 // 16, 40.0, 150.0)], 512)
    assert [line.count("|") for line in lines] == [9] * 4
    assert lines[2] == "| Q4_K | 4.50 | 20.0 | 1652 | 1.00 | 300 | 200 | 1.00 |"
    assert lines[3] == "| Q8_0 | 8.50 | 40.0 | 1560 | 2.00 | 150 | 401 | 0.50 |"


def test_every_quantized_format_is_measured() -> None:
    assert {"Q4_K", "IQ1_M", "NVFP4", "Q1_0"} <= set(names())
    assert "F16" not in names()
