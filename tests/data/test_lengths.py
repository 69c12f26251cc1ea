"""What is cut or left out is counted in rows."""

from lit_klrb.data.chat import LeftOutError
from lit_klrb.data.encode import Encoded
from lit_klrb.data.kinds import Row
from lit_klrb.data.lengths import Selection


def test_rows_are_counted_of_which_answers_are_cut(caplog):
    """Both answers of a pair may be cut; a row that is left out after all is not among them."""
    selection = Selection("source", "pairs", "train", limit=3, overlong="cut")

    def make(index, row):
        for length in row.columns["lengths"]:
            if not length:
                raise LeftOutError("empty")
            selection.within(Encoded(list(range(length)), [False] + [True] * (length - 1)))

    rows = [Row("", columns={"lengths": lengths}) for lengths in ((4, 5), (2, 6), (2, 3), (4, 0))]
    selection.read(rows, make)
    assert (selection.cut, selection.left_out) == (2, 1)
    assert "pairs: the answers of 2 of 4 train rows are cut to max_tokens=3" in caplog.messages
