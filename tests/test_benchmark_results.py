"""CSV files of the benchmarks: which rows are replaced, and that other rows do not change."""

import pytest

pytest.importorskip("pandas")

from benchmarks.harness import results

KEY = ["rate", "workers"]


def test_rows_with_the_same_key_are_replaced_and_others_stay_text_for_text(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("rate,workers,ms,note\n1gbit,4,1.50,a\n1gbit,4,2.50,b\n100mbit,4,3.10,\n")
    results.save(path, [{"rate": "1gbit", "workers": 4, "ms": 0.123456, "note": "c, d"}], KEY, digits=3)
    assert path.read_text() == 'rate,workers,ms,note\n100mbit,4,3.10,\n1gbit,4,0.123,"c, d"\n'


def test_a_new_column_is_empty_in_old_rows(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("rate,workers,ms\n1gbit,4,1.50\n")
    results.save(path, [{"rate": "1gbit", "workers": 8, "ms": 2.0, "cores": 2}], KEY)
    assert path.read_text() == "rate,workers,ms,cores\n1gbit,4,1.50,\n1gbit,8,2.0,2\n"


def test_without_a_key_the_file_is_replaced_and_without_rows_it_is_left(tmp_path):
    path = tmp_path / "new" / "results.csv"
    results.save(path, [{"a": 1, "b": None}, {"a": 2.5, "b": True}])
    assert path.read_text() == "a,b\n1,\n2.5,True\n"
    results.save(path, [])
    assert results.load(path)["a"].tolist() == [1.0, 2.5]
    results.save(path, [{"a": 3}])
    assert path.read_text() == "a\n3\n"


def test_empty_cells_of_text_columns_are_empty_strings(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("name,ms\n,1.5\nx,\n")
    table = results.load(path)
    assert table["name"].tolist() == ["", "x"]
    assert table["ms"].isna().tolist() == [False, True]
    assert results.load(tmp_path / "missing.csv").empty
