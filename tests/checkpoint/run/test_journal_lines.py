"""Lines of a journal that say another length than they have end what counts, and what follows is written."""

from pathlib import Path

import pytest

from zeropoint.checkpoint.run.journal import Journal


@pytest.mark.parametrize("length", [b"0000800d", b"0000000c", b"-0000002", b"ffffffff", b"        "])
def test_a_last_line_of_another_length_is_cut_off(length: bytes, tmp_path: Path) -> None:
    """Were it taken for its right CRC, what is appended behind it would be lost at the next start."""
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append([{"unit": 1}])
    journal.append([{"shard": "a"}])
    journal.close()
    raw = path.read_bytes()
    last = raw.rindex(b"\n", 0, -1) + 1
    path.write_bytes(raw[:last] + length + raw[last + 8 :])
    again = Journal(path)
    assert again.records == [{"unit": 1}]
    again.append([{"shard": "b"}])
    again.close()
    end = Journal(path)
    assert end.records == [{"unit": 1}, {"shard": "b"}]
    end.close()
