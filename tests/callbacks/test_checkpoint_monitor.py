"""A checkpoint follows a metric that is logged, or the run ends in one line."""


def test_a_metric_that_is_logged_is_followed(chain, tmp_path):
    options = ["--checkpoint.monitor", "val/reward", "--checkpoint.mode", "max"]
    assert chain.run("fit", "rloo", *options, run=tmp_path) == 0
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
