from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replication import sentiment

GOOD = ["a great film", "great and moving, a great film!", "moving", "a film I love"]
BAD = ["a dull film", "dull and long, a dull film!", "long", "a film I hate"]


def test_command_trains_a_reward(tmp_path, monkeypatch, capsys):
    table = pa.table({"text": GOOD + BAD, "label": [1] * len(GOOD) + [0] * len(BAD)})
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / f"{split}.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sentiment, "_classifier", sentiment._classifier.__wrapped__)
    sentiment.main(Path("."))
    assert capsys.readouterr().out == "right on 1.0000 of 8 test reviews\n"
    good, bad = sentiment.log_odds(["great", "dull"])
    assert good > 0 > bad
