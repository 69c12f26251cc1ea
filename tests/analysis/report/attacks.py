"""Changes of the files of a sweep by which an arm looks better."""

import numpy as np
from synthetic import edit_plan, fail, grid_results, id_of, publish, settle

ARM, CONTROL = "RaoBlackwell", "MonteCarlo"
GONE = None


def put(made, changes):
    """Change a result: path of keys -> value, function of the value, or GONE; or a function of the result."""
    if callable(changes):
        changes(made)
        return
    for path, value in changes.items():
        *folders, key = path.split(" ")
        node = made
        for folder in folders:
            node = node[folder]
        if value is GONE:
            node.pop(key)
        else:
            node[key] = value(node[key]) if callable(value) else value


def change(which, changes, *, settled=False, then=lambda runs: None):
    """An attack that publishes the runs of an arm, or the run of a place, anew, with a valid checksum."""

    def attack(runs):
        arm, place = (which[0], which) if isinstance(which, tuple) else (which, None)
        for where, made in grid_results(runs, arm).items():
            if place in (None, where):
                put(made, changes)
                publish(runs / "results", settle(made) if settled else made)
        then(runs)

    return attack


def logged(key, of):
    """An edit of a metric in the result and in all curves, where `of` maps the value and beta."""

    def edit(made):
        beta = made["cell"]["beta"]
        made["final"][key] = of(made["final"][key], beta)
        for source in ("train", "val"):
            curve = made["curves"][f"{source}/{key}"]
            curve["value"] = [of(value, beta) for value in curve["value"]]

    return edit


def copied(source, target, changes=()):
    """An attack that publishes a run as that of another cell."""

    def attack(runs):
        found = grid_results(runs)
        made = {**found[source], **{key: found[target][key] for key in ("id", "cell")}}
        made["settings"] |= {"kl.beta": found[target]["cell"]["beta"]}
        put(made, changes or {})
        publish(runs / "results", made)

    return attack


def digit(made):
    made["final"]["kl"] += 0.001
    made["curves"]["train/kl"]["value"][3] += 0.001
    settle(made)


def factor(made):
    """Every digit of a copy times 1 + 1e-4."""
    for values in (curve["value"] for curve in made["curves"].values()):
        values[1:] = [value * (1 + 1e-4) for value in values[1:]]
    made["final"] = {key: value * (1 + 1e-4) for key, value in made["final"].items()}


def ended(made):
    """A run of the control that was evaluated, as one that diverged at its end."""
    made |= {"state": "diverged", "final": {"reward": None, "kl": made["final"]["kl"]}}
    for key in ("val/reward", "val/kl"):
        made["curves"][key]["value"][-1] = None


def penalised(value, beta):
    return value - beta * 0.4


def planned(runs, key="model.temperature", value=0.7):
    """The plan says that an arm is evaluated otherwise."""

    def edit(document):
        for plan in (document["content"]["plan"], document["history"][0]["plan"]):
            plan["grid"]["arms"][ARM][key] = value
        for cell in document["cells"]:
            if cell["arm"] == ARM:
                cell["overrides"][key] = value

    edit_plan(runs, edit)
    change(ARM, {f"cell overrides {key}": value, f"settings {key}": value})(runs)


def lost(runs):
    """The best runs of the control become failures."""
    found = grid_results(runs, CONTROL)
    for place in sorted(found, key=lambda place: -found[place]["final"]["reward"])[:3]:
        fail(runs, place)
        (runs / "results" / f"{found[place]['id']}.json").unlink()


def deleted(runs):
    for made in list(grid_results(runs, CONTROL).values())[:3]:
        (runs / "results" / f"{made['id']}.json").unlink()


def reseeded(runs):
    def edit(document):
        for cell in document["cells"]:
            cell["seed"] += cell["arm"] == ARM

    edit_plan(runs, edit)
    change(ARM, {"cell seed": lambda seed: seed + 1})(runs)


def other_seeds(runs, config):
    """All runs of the grid have other seeds than the plan gives, and ids that follow from them."""
    moved = {}
    for made in grid_results(runs).values():
        where = made["cell"] | {"seed": made["cell"]["seed"] + 1}
        moved[made["id"]] = {**made, "id": id_of(where, config), "cell": where}

    def edit(document):
        for cell in document["cells"]:
            if (made := moved.get(cell["id"])) is not None:
                cell |= {"id": made["id"], "seed": made["cell"]["seed"]}

    edit_plan(runs, edit)
    for old, made in moved.items():
        (runs / "results" / f"{old}.json").unlink()
        publish(runs / "results", made)


def renumbered(runs):
    """The first two replicates of an arm exchange their numbers and seeds, in the plan and in the results."""
    found = grid_results(runs, ARM)
    of = {
        made["id"]: found[ARM, index, 1 - place]["cell"]
        for (_, index, place), made in found.items()
        if place < 2
    }

    def edit(document):
        for cell in document["cells"]:
            cell |= {key: of[cell["id"]][key] for key in ("replicate", "seed")} if cell["id"] in of else {}

    edit_plan(runs, edit)
    for made in found.values():
        if made["id"] in of:
            publish(runs / "results", {**made, "cell": of[made["id"]]})


def prompts(kept=16, error=1.0, evaluated=16, changes=()):
    """An attack that keeps the best prompts of an arm, or multiplies its standard errors."""

    def attack(runs):
        for (arm, *_), made in grid_results(runs).items():
            for key in ("reward", "kl"):
                own = made["final"][key] + np.linspace(-0.5, 0.5, 16)[-kept if arm == ARM else 0 :]
                recorded_error = own.std(ddof=1) / len(own) ** 0.5 * (error if arm == ARM else 1)
                made["final"] |= {key: float(own.mean()), f"{key}_se": float(recorded_error)}
                made.setdefault("prompts", {})[key] = own.tolist()
            made["evaluation_prompts"] = evaluated
            put(made, changes or {})
            publish(runs / "results", settle(made))

    return attack


def shifted(runs):
    """All runs of an arm are those of the control with a larger reward, rounded."""
    found = grid_results(runs)
    for (arm, *place), made in found.items():
        if arm == ARM:
            made["final"]["reward"] = round(found[CONTROL, *place]["final"]["reward"] + 0.6, 4)
            publish(runs / "results", settle(made))
