"""What certifies the losses of other software: a changed loss is named, and the page is what was kept."""

import ast
import subprocess
import sys
import typing
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from benchmarks.peers import __main__ as command, hooks, importing, page, spread, verdicts
from benchmarks.peers.setting import HOOK, Setting

K3 = "log_ratio + (-log_ratio).exp() - 1"
K2 = "log_ratio.square() / 2"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package with one loss, whose formula can be changed, as the only software."""

    def write(formula):
        (tmp_path / "stand_in.py").write_text(
            "def kl_loss(p, q, mask):\n    log_ratio = p - q\n"
            f"    return (({formula}) * mask).sum() / mask.sum()\n"
        )
        sys.modules.pop("stand_in", None)

    def settings():
        import stand_in

        def loss(logprobs, ref_logprobs, mask):
            return 0.1 * stand_in.kl_loss(logprobs, ref_logprobs, mask)

        yield Setting("kl_loss", {"beta": 0.1}, {"beta": 0.1}, "KL loss", loss)

    adapter = ModuleType("benchmarks.peers.adapters.stand_in")
    adapter.DISTRIBUTION, adapter.settings = "torch", settings
    monkeypatch.setitem(sys.modules, adapter.__name__, adapter)
    monkeypatch.setattr(command, "ADAPTERS", ["stand_in"])
    monkeypatch.setattr(command, "two_processes", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(verdicts, "FILE", tmp_path / "verdicts.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "TITLES", {"stand_in": "Stand-in"})
    for name in ("TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "page.md").write_text(f"before\n{page.BEGIN}\n{page.END}\nafter\n")
    yield write
    sys.modules.pop("stand_in", None)


def test_each_process_has_one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with command.two_processes() as pool:
        assert pool.submit(torch.get_num_threads).result() == 1


def test_a_changed_loss_fails_and_is_named(stand_in, capsys):
    stand_in(K3)
    assert command.main([]) == 1
    assert "kl_loss beta=0.1: new, 0.1 x reverse_own_token" in capsys.readouterr().out
    assert command.main(["--keep"]) == 0
    assert command.main([]) == 0
    (row,) = [line for line in page.PAGE.read_text().splitlines() if "kl_loss" in line]
    assert "| `kl_loss beta=0.1`, **default** | KL loss | 0.1 x reverse_own_token |" in row
    assert page.PAGE.read_text().startswith("before\n")
    kept = verdicts.read(verdicts.FILE)
    kept["stand_in"]["stubs"] = ["ray", "vllm"]
    assert page.table(kept).endswith("do not use: Stand-in without ray, vllm.")
    assert page.PAGE.read_text().endswith("after\n")
    stand_in(K2)
    capsys.readouterr()
    assert command.main([]) == 1
    said = capsys.readouterr()
    assert "kl_loss beta=0.1: gradient was 0.1 x reverse_own_token, is 0.1 x kl_own_token" in said.out
    assert "verdicts changed" in said.err
    stand_in("undefined")
    assert command.main([]) == 1
    said = capsys.readouterr().out
    assert "FAILED kl_loss beta=0.1: LossError: NameError: name 'undefined' is not defined" in said
    assert "kl_loss beta=0.1: gone" in said


def test_what_is_not_there_is_left_out_and_its_verdicts_stay(stand_in, capsys, monkeypatch):
    stand_in(K3)
    command.main(["--keep"])
    before = verdicts.FILE.read_text()
    adapter = sys.modules["benchmarks.peers.adapters.stand_in"]
    monkeypatch.setattr(adapter, "DISTRIBUTION", "no-such-distribution")
    assert command.main(["--keep"]) == 0
    assert "stand_in: left out, as no-such-distribution is not installed; its last" in capsys.readouterr().out
    assert verdicts.FILE.read_text() == before
    monkeypatch.setattr(adapter, "REPOSITORY", "someone/something", raising=False)
    command.main([])
    assert "left out, as no folder of snapshots is given (PEERS_GIT)" in capsys.readouterr().out


def test_numbers_may_differ_by_rounding_alone():
    kept = {"losses": {"a": {"gradient": "kl", "cosine": [1.0, 0.5], "spread": [None, 0.2]}}}
    for cosine, spreads, count in ((0.5005, 0.2, 0), (0.51, 0.2, 1), (0.5, None, 1)):
        found = {"losses": {"a": {"gradient": "kl", "cosine": [1.0, cosine], "spread": [None, spreads]}}}
        assert len(verdicts.differences(kept, found)) == count


def test_the_page_is_what_is_kept():
    if not verdicts.FILE.exists():
        pytest.skip("no verdicts are kept yet: make peers KEEP=1 writes them")
    kept = verdicts.read(verdicts.FILE)
    assert set(kept) == set(command.ADAPTERS) == set(page.TITLES)
    assert page.table(kept) in page.PAGE.read_text("utf-8")
    losses = [loss for about in kept.values() for loss in about["losses"].values()]
    assert len(losses) >= 40
    of_hooks = [loss for loss in losses if loss["called"] == HOOK]
    assert len(of_hooks) == 5
    assert all(loss["gradient"].split(" x ")[-1] == "kl" for loss in of_hooks)


def test_the_spread_of_a_batch_is_that_of_its_mean():
    """With completions averaged, the variance is that of one over their number, here by enumeration."""

    def loss(inputs):
        index = inputs.tokens[..., None]
        p, q = (x.log_softmax(-1).gather(-1, index)[..., 0] for x in (inputs.logits, inputs.ref_logits))
        return torch.where(inputs.mask, (p - q).square() / 2, 0).sum(-1).mean()

    world = spread.worlds(off_policy=False)[spread.EXAMINED]
    tokens, mask = world.policy.sequences()
    chances = world.policy.logprobs(tokens, mask).exp()
    single = []
    for row in range(len(tokens)):
        leaf = world.policy.logits.clone().requires_grad_()
        model = type(world.policy)(leaf, world.policy.max_length)
        logits, ref = model.token_logits(tokens), world.reference.token_logits(tokens)
        log_ratio = [x.log_softmax(-1).gather(-1, tokens[..., None])[row, :, 0] for x in (logits, ref)]
        value = ((log_ratio[0] - log_ratio[1]).square() / 2)[mask[row]].sum()
        single.append(torch.autograd.grad(value, leaf)[0])
    gradients = torch.stack(single)
    mean = torch.einsum("n,n...->...", chances, gradients)
    variance = chances @ (gradients - mean).square().sum((1, 2))
    found = spread.spread(loss, {4: 800, 64: 800})
    for size, value in zip((4, 64), found.spread, strict=True):
        assert value == pytest.approx((variance / size).sqrt().item() / mean.norm().item(), rel=0.06)


def test_a_loss_that_couples_completions_is_computed_for_each_batch(monkeypatch):
    def loss(inputs):
        index = inputs.tokens[..., None]
        p, q = (x.log_softmax(-1).gather(-1, index)[..., 0] for x in (inputs.logits, inputs.ref_logits))
        return torch.where(inputs.mask, p - q, 0).sum(-1).mean().square() / 2

    found = spread.spread(loss, {2: 20, 8: 20})
    monkeypatch.setattr(spread, "_of_single_ones", lambda gradient_of, *_: gradient_of)
    assert found == spread.spread(loss, {2: 20, 8: 20})


def test_modules_that_are_missed_are_stubbed(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text(
        "from no_such_engine.parts import Base, Other, decorate\n\n\n"
        "class Loss(Base, Other):\n    value = 3\n\n\n"
        "@decorate\ndef two():\n    return 2\n\n\n@decorate(1, 2)\ndef one(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(typing, "TypedDict", typing.TypedDict)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(importing, "STUBS", importing.Stubs())
    try:
        module = importing.load("needy")
        assert (module.Loss.value, module.two()) == (3, 2)
        assert importing.STUBS.names == {"no_such_engine"}
        with pytest.raises(ModuleNotFoundError):
            importing.load("needy.part")
    finally:
        for name in ("needy", "no_such_engine", "no_such_engine.parts"):
            sys.modules.pop(name, None)


def test_a_snapshot_is_unpacked_with_its_commit(tmp_path):
    folder = tmp_path / "snapshots" / "owner+name"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "loss.py").write_text("x = 1\n")
    (folder / "large.bin").write_text("left")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "m", "--date", "2026-08-01T00:00"], check=True)
    source = importing.unpack(tmp_path / "snapshots", "owner/name", ("code",), tmp_path / "out")
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert head.startswith(source.version)
    assert len(source.date) == 10
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["code", "loss.py"]
    assert importing.unpack(tmp_path, "owner/other", (), tmp_path) is None


def test_defaults_are_read_from_the_source(tmp_path):
    script = tmp_path / "arguments.py"
    script.write_text(
        "p.add_argument('--kl-loss-type', type=str, default='k1')\n"
        "p.add_argument('--use-kl-loss', action='store_true')\np.add_argument('--path', default=None)\n"
    )
    assert importing.argument_defaults(script) == {"kl-loss-type": "k1", "use-kl-loss": False, "path": None}


def test_the_hooks_of_the_page_are_short_modules(tmp_path):
    names = hooks.write_hooks(tmp_path)
    assert names == ["verl_klrb", "prime_klrb", "skyrl_klrb", "slime_klrb"]
    for name in names:
        functions = [
            n for n in ast.parse((tmp_path / f"{name}.py").read_text()).body if isinstance(n, ast.FunctionDef)
        ]
        assert functions
        assert all(n.end_lineno - n.lineno < 11 for n in functions)
