"""The changes that affect a cell's id, and those that do not."""

from copy import deepcopy

import pytest

from analysis.design.fingerprint import (
    NON_SEMANTIC,
    digest,
    environment,
    read_config,
    semantic,
    with_contents,
)
from lit_klrb.errors import ConfigurationError


def put(config, path, value):
    changed = deepcopy(config)
    node = changed
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value
    return changed


@pytest.mark.parametrize("key", NON_SEMANTIC)
def test_a_non_semantic_key_does_not_matter_and_all_others_do(key):
    base = {"trainer": {"max_steps": 1}, "data": {"init_args": {"size": 2}}}
    changed = put(base, key.split("."), {"any": "value"})
    assert changed != base
    assert semantic(changed) == semantic(base) == base


def test_a_replaced_key_does_not_matter():
    config = {"model": {"init_args": {"policy_path": "here", "width": 1}}}
    assert semantic(config, ["model.init_args.policy_path"]) == {"model": {"init_args": {"width": 1}}}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53, {1: 2}])
def test_values_without_a_canonical_form_are_refused(value):
    with pytest.raises(ValueError, match=r"."):
        digest({"a": value})


def test_overrides_replace_and_add_keys_of_a_config(tmp_path):
    path = tmp_path / "stage.yaml"
    path.write_text("width: 3\nmodel: {n: '${width}', rate: 1e-4}\n")
    overridden = read_config(str(path), {"width": 5, "model.rate": 0.1, "trainer.max_steps": 2})
    assert overridden == {"width": 5, "model": {"n": 5, "rate": 0.1}, "trainer": {"max_steps": 2}}


def test_local_models_and_data_enter_by_content_and_not_by_path(tmp_path):
    def config(name, content, source="stanfordnlp/imdb"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "last.ckpt").write_text(content)
        model = {"policy_path": str(tmp_path / name / "last.ckpt"), "reference_path": str(tmp_path / name)}
        return with_contents({"model": {"init_args": model}, "data": {"init_args": {"source": source}}})

    one = config("one", "weights")
    assert one == config("other", "weights")
    changed = config("one", "more weights")
    assert one["data"] == changed["data"] == {"init_args": {"source": "stanfordnlp/imdb"}}
    for key in ("policy_path", "reference_path"):
        assert one["model"]["init_args"][key] != changed["model"]["init_args"][key]
    assert config("one", "weights", source=str(tmp_path / "one")) != one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("a: [1", "expected"),
        ("- 1", "a mapping is expected"),
        ("a: ${b}", "Interpolation key 'b' not found"),
        ("a: .nan", "nan is not representable"),
        ("1: 2", "keys must be strings"),
    ],
)
def test_an_unreadable_config_is_named_in_one_line(tmp_path, text, message):
    path = tmp_path / "stage.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_config(str(path), {})
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.fixture
def code(tmp_path, monkeypatch):
    """The code hash of a package with the given files."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "hashed_package"
    (package / "inner").mkdir(parents=True)

    def code(**files):
        for name, text in {"__init__": "from .inner import mod", "inner/mod": "", **files}.items():
            (package / f"{name}.py").write_text(text)
        return environment("hashed_package", threads=1)["code"]

    code.package = package
    return code


def test_the_code_hash_ignores_comments_docstrings_and_layout(code):
    source = 'def f(x):\n    """Doc."""\n    return x + 1\n'
    original = code(**{"inner/mod": source})
    assert code(**{"inner/mod": '# why\ndef f( x ):\n    """Other."""\n\n    return (x + 1)\n'}) == original
    assert code(**{"inner/mod": source.replace("1", "2")}) != original
    assert code(**{"inner/mod": source, "__init__": "import hashed_package.inner.mod\n" + source}) != original
    assert code(**{"inner/mod": 'def f(x):\n    "Doc."\n    "Second."\n    return x + 1\n'}) != original
    code(**{"inner/mod": source})
    (code.package / "inner" / "mod.py").rename(code.package / "inner" / "other.py")
    assert code(**{"inner/mod": "", "__init__": "from .inner import other"}) != original


def test_the_code_hash_includes_data_files_but_not_caches(code):
    original = code()
    (code.package / "__pycache__").mkdir()
    (code.package / "__pycache__" / "mod.pyc").write_bytes(b"1")
    assert code() == original
    (code.package / "unused").mkdir()
    (code.package / "unused" / "__init__.py").touch()
    (code.package / "unused" / "words.txt").write_text("good")
    assert code() == original
    (code.package / "words.txt").write_text("good")
    with_words = code()
    assert with_words != original
    (code.package / "inner" / "lists").mkdir()
    (code.package / "inner" / "lists" / "words.txt").write_text("bad")
    assert code() == with_words  # `inner` is no package
    (code.package / "inner" / "__init__.py").touch()
    assert code() != with_words


def test_versions_and_threads_matter(monkeypatch):
    one = environment("lit_klrb", threads=1)
    assert {"code", "python", "torch", "lightning", "transformers", "threads"} <= set(one)
    assert digest({**one, "threads": 2}) != digest(one)
    monkeypatch.setattr("analysis.design.fingerprint.version", lambda name: "0" if name == "torch" else "1")
    assert environment("lit_klrb.schema", threads=2)["torch"] == "0"
    assert environment("lit_klrb.schema", threads=2)["threads"] == 2


def test_a_missing_module_is_named():
    with pytest.raises(ConfigurationError, match="module: 'no_such_package' is not installed"):
        environment("no_such_package", threads=1)
