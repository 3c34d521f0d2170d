import gzip
import json
import os

import pytest

from narrowcast.errors import ConfigError, UnsupportedError
from narrowcast.workloads.sft.data.sources import read_rows

ROWS = [{"question": "é?", "answer": "one,\ntwo"}, {"question": "b", "answer": '"c"'}]
TEXTS = {
    "a.json": json.dumps(ROWS),
    "b.json": json.dumps({"data": ROWS}),
    "c.jsonl": "\n".join(json.dumps(row) for row in ROWS) + "\n\n",
    "d.csv": 'question,answer\né?,"one,\ntwo"\nb,"""c"""\n',
    "e.jsonl": "\ufeff" + "\r\n".join(json.dumps(row) for row in ROWS),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_kind_of_file_gives_the_same_rows(name, packed, tmp_path):
    path = tmp_path / (name + ".gz" if packed else name)
    content = TEXTS[name].encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    assert [row.values for row in read_rows(path)] == ROWS


def test_a_parquet_file_is_read_or_what_reads_it_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        with pytest.raises(UnsupportedError, match=r"needs pyarrow. Run pip install 'pyarrow'"):
            list(read_rows(path))
        return
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert [row.values for row in read_rows(path)] == ROWS


BAD = {
    "a.jsonl": ('{"a": 1}\n{"a": \n', "a.jsonl, line 2 is not JSON"),
    "b.jsonl": (
        '{"a": 1}\n\n[1]\n',
        "b.jsonl, line 3 must be an object, got a list",
    ),
    "c.jsonl": ('{"a": NaN}\n', "c.jsonl, line 1 is not JSON: NaN is not a JSON number"),
    "d.jsonl": ("[" * 100_000, "d.jsonl, line 1 is nested too deep"),
    "e.jsonl": ("", "e.jsonl has no rows"),
    "f.jsonl": ("\n \n", "f.jsonl has no rows"),
    "g.json": ("", "g.json has no rows"),
    "h.json": ("[]", "h.json has no rows"),
    "i.json": ('{"rows": []}', "i.json must be a list of rows, got a JSON object"),
    "j.json": ('[{"a": 1}, 3]', "j.json, row 2 must be an object, got a number"),
    "k.csv": ("a,b\n1,2\n1,2,3\n", "k.csv, line 3 must have 2 fields, got 3"),
    "l.csv": ("a,a\n1,2\n", "l.csv, line 1: column a occurs twice"),
    "m.csv": ('a,b\n"1,2\n', "m.csv, line 2: unexpected end of data"),
    "n.csv": ("a,b\n", "n.csv has no rows"),
    "o.txt": ("x", "The file must end in .json, .jsonl, .csv, .parquet"),
    "p.jsonl.gz": ("x", "p.jsonl.gz is not a complete .gz file"),
    "q.jsonl": (b'{"a": 1}\n{"a": "\xff"}', "q.jsonl, line 2 is not UTF-8 text"),
    "r.csv": (b"a,b\n1,\xff\n", "r.csv, after line .* is not UTF-8 text"),
    "s.jsonl": ("9" * 5000, "s.jsonl, line 1 is not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_file_and_line(name, tmp_path):
    content, said = BAD[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=said):
        list(read_rows(path))


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() * 100)[:-20])
    with pytest.raises(ConfigError, match=r"not a complete .gz file"):
        list(read_rows(path))


def test_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"a.jsonl cannot be read: it is a pipe, not a file"):
        list(read_rows(path))


def test_lines_are_read_one_at_a_time(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\nbad')
    rows = read_rows(path)
    assert [next(rows).values["a"], next(rows).values["a"]] == [1, 2]


def test_an_answer_longer_than_the_usual_limit_of_csv_is_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"a,b\nx,{'y' * 200_000}\n")
    assert len(next(read_rows(path)).values["b"]) == 200_000


def test_real_files_have_as_many_rows_as_they_are_known_for(shared):
    counts = {
        "gsm8k_train.jsonl.gz": 7473,
        "gsm8k_test.jsonl.gz": 1319,
        "rasbt_instruct_1100.json": 1100,
    }
    assert {name: sum(1 for _ in read_rows(shared / name)) for name in counts} == counts
