import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replication import sentiment

GOOD = ["a great film", "great and moving, a great film!", "moving", "a film I love"]
BAD = ["a dull film", "dull and long, a dull film!", "long", "a film I hate"]


def test_command_trains_a_reward(tmp_path: Path) -> None:
    table = pa.table({"text": GOOD + BAD, "label": [1] * len(GOOD) + [0] * len(BAD)})
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / f"{split}.parquet")
    root = Path(sentiment.__file__).parents[1]
    code = (
        "from replication import sentiment; from pathlib import Path; sentiment.main(Path('.')); "
        "good, bad = sentiment.log_odds(['great', 'dull']); assert good > 0 > bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right on 1.0000 of 8 test reviews\n"
