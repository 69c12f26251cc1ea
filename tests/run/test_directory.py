from lit_klrb import schema
from lit_klrb.run.directory import next_attempt, set_aside


def test_only_a_run_is_set_aside(tmp_path):
    root = tmp_path / "run"
    assert set_aside(root) is None
    (root / "notes").mkdir(parents=True)
    assert set_aside(root) is None
    assert root.exists()


def test_each_earlier_run_keeps_a_place_of_its_own(tmp_path, capsys):
    root = tmp_path / "run"
    for number, name in enumerate((schema.CONFIG, schema.SUMMARY, schema.CHECKPOINT), start=1):
        file = root / name
        file.parent.mkdir(parents=True)
        file.write_text(str(number))
        kept = set_aside(root)
        assert kept == tmp_path / f"run.{number}"
        assert capsys.readouterr().out == f"kept the earlier run as {kept}\n"
        assert (kept / name).read_text() == str(number)
        assert not root.exists()


def test_attempts_are_counted(tmp_path):
    assert next_attempt(tmp_path) == 0
    for number in range(3):
        (tmp_path / schema.METRICS_DIR / f"attempt_{number}").mkdir(parents=True)
        assert next_attempt(tmp_path) == number + 1
