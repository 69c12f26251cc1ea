"""`python -m lit_klrb certify MODULE:FUNCTION`: which known gradient a KL loss has, by enumeration."""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import torch
import yaml

from lit_klrb.cli.arguments import Arguments
from lit_klrb.cli.loss_roles import ROLES, BoundLoss
from lit_klrb.errors import ConfigurationError, error_line, printable, refusing
from lit_klrb.estimators.certificate import TOLERANCE, ZERO, Certificate, GradientIdentity, Level, certify
from lit_klrb.estimators.enumerated_loss import KNOWN, LossError
from lit_klrb.reward_functions import import_member
from lit_klrb.terminal import print_table

CLAIMS = (*KNOWN, ZERO)
# Claims that more than the gradient of that name fulfils: the other direction, of completions or of tokens.
FULFILLED_BY = {"reverse": ("reverse", "reverse_own_token")}
MEANING = {
    "kl": "the gradient of KL(policy || reference)",
    "kl_own_token": "the gradient of each token's KL(policy || reference) given its prefix; it omits the "
    "effect of a token on later KLs",
    "reverse": "the gradient of KL(reference || policy), the other direction",
    "reverse_own_token": "the gradient of each token's KL(reference || policy) given its prefix: the other "
    "direction, without the effect of a token on later KLs",
    ZERO: "zero in expectation",
}
NORMALISATIONS = {
    "batch": "divided by the number of tokens in the batch, which biases small batches and not large ones",
    "length": "each completion's loss is divided by its own length: tokens of long completions count less, "
    "and this is not the gradient above",
}
EPILOG = f"""The function is imported, which runs its module, and called on all completions of six pairs of
small models, alone and in pairs; the answer has a table of their sizes. Parameters are recognised by name,
such as per_token_logps, ref_log_prob, student_logits, response_mask; --argument names the role of others:
{", ".join(ROLES)}.
It returns a scalar, a loss per completion or per token, or a tuple that starts with one of them.

exit codes: 0, with --claims only if it has the claimed gradient; 1 if not, or if the function raises;
2 wrong usage

example: python -m lit_klrb certify my_losses:kl_loss --claims kl --option beta=0.1
"""


def parser() -> Arguments:
    """The parser of the command's options."""
    command = Arguments("certify", __doc__, EPILOG)
    add = command.add_argument
    add("function", metavar="MODULE:FUNCTION", help="a loss of log-probabilities or logits of both models")
    add("--claims", choices=CLAIMS, help="the gradient that it must have; reverse is either form of it")
    add("--argument", action="append", default=[], metavar="NAME=ROLE", help="what a parameter is")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="the value of a parameter")
    return command


def main(argv: Sequence[str]) -> int:
    """Run `certify` and return the exit code."""
    options = parser().parse_args(argv)
    answer = _in_a_process(lambda: _certify(options))
    if answer is None:
        print(error_line(f"{options.function} ended the program: it has no certificate"), file=sys.stderr)
        return 1
    code, output, errors = answer
    sys.stdout.write(output)
    sys.stderr.write(errors)
    return code


def _in_a_process(command: Callable[[], int]) -> tuple[int, str, str] | None:
    """Exit code, output and errors of a command in a process of its own; None if its code ended that one."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)  # a forked process has no others
        code, output, errors = 1, StringIO(), StringIO()
        output.isatty = sys.stdout.isatty  # type: ignore[method-assign]
        with redirect_stdout(output), redirect_stderr(errors):
            try:
                code = command()
            except ConfigurationError as error:
                print(error_line(error), file=sys.stderr)
                code = 2
            except BaseException:
                traceback.print_exc()
        with open(writing, "w") as pipe:
            json.dump([code, output.getvalue(), errors.getvalue()], pipe)
        os._exit(0)
    os.close(writing)
    try:
        with open(reading) as pipe:
            text = pipe.read()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return tuple(json.loads(text)) if text else None


def _certify(options: argparse.Namespace) -> int:
    module, _, name = options.function.partition(":")
    if not module or not name:
        raise ConfigurationError(f"MODULE:FUNCTION is expected, got {options.function}")
    arguments = dict(_pairs("argument", options.argument))
    for key, role in arguments.items():
        if role not in ROLES:
            problem = f"{key}={role}: the role must be one of {', '.join(ROLES)}"
            raise ConfigurationError(problem, key="argument")
    values = {}
    for key, text in _pairs("option", options.option):
        with refusing(f"{key} has no plain value: {text}", yaml.YAMLError, ValueError, key="option"):
            values[key] = yaml.safe_load(text)
    loss = BoundLoss(options.function, import_member(options.function, module, name), arguments, values)
    try:
        found = certify(loss, takes_mask=loss.takes_mask, takes_old=loss.takes_old)
    except LossError as error:
        print(error_line(f"{options.function} failed: {error}"), file=sys.stderr)
        return 1
    _print_page(loss, found, options.claims)
    return int(options.claims is not None and not has_gradient(found, options.claims))


def has_gradient(found: Certificate, claim: str) -> bool:
    """Whether a loss has the gradient on-policy, times a positive factor, whatever the padding holds."""
    verdict = found.on_policy
    return (
        verdict.name in FULFILLED_BY.get(claim, (claim,))
        and verdict.normalisation != "length"
        and (claim == ZERO or (verdict.scale or 0) > 0)
        and found.padding <= TOLERANCE
    )


def _pairs(key: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"NAME=VALUE is expected, got {text}", key=key)
        yield name, value


def _print_page(loss: BoundLoss, found: Certificate, claim: str | None) -> None:
    reads = (key if key == role else f"{key} ({role})" for key, role in loss.roles.items())
    lines = [f"{loss.name} reads {', '.join(reads)} and returns {loss.returned}"]
    lines += _gradient("gradient", found.on_policy)
    if not found.depends:
        lines.append("  the loss does not depend on the policy: is it detached?")
    if found.alone is not None:
        lines += _gradient("one completion alone", found.alone)
    lines += _remarks(loss, found)
    print(*map(printable, lines), "", sep="\n")
    _print_levels("completions of the policy", found.on_policy)
    if found.off_policy is not None:
        print("", *_gradient("off-policy, with old log-probabilities", found.off_policy), sep="\n")
        _print_levels("completions of another policy", found.off_policy)
    if claim is not None:
        holds = "has" if has_gradient(found, claim) else "does NOT have"
        print(printable(f"\n{loss.name} {holds} the gradient that it claims: {claim}", keep="\n"))


def _gradient(label: str, verdict: GradientIdentity) -> list[str]:
    if verdict.name is None:
        lines = [f"{label}: other, none of the known ones"]
        if verdict.nearly is not None:
            ways = [shown for i, shown in enumerate(map(_size, verdict.levels)) if i in verdict.agrees_at]
            lines.append(f"  {verdict.nearly} only with {'; '.join(ways)}: is a part clamped or left out?")
        return lines
    name, _, condition = verdict.name.partition(" (")
    meaning = MEANING[name] + (", on prefixes of the policy that generated" if condition else "")
    lines = [f"{label}: {name}, {meaning}"]
    if verdict.scale and abs(verdict.scale - 1) > TOLERANCE:
        sign = " with the WRONG SIGN" if verdict.scale < 0 else ""
        lines.append(f"  times {verdict.scale:.4g}{sign}")
    if verdict.normalisation != "sum":
        lines.append(f"  {NORMALISATIONS[verdict.normalisation]}")
    return lines


def _remarks(loss: BoundLoss, found: Certificate) -> Iterator[str]:
    if found.alone_error is not None:
        yield f"  batches of one completion fail ({found.alone_error}): batches of two were tried"
    if not found.paired:
        yield "  it takes no mask: single completions without padding were tried"
    if found.over_batch:
        yield "  completions of a batch are summed, not averaged: the scale grows with the batch"
    if found.over_width:
        yield "  divided by the number of positions, padding included: the scale changes with the padding"
    if found.padding > TOLERANCE:
        yield f"  what lies outside the mask CHANGES the gradient, by {found.padding:.2g} of its size"
    elif found.paired:
        yield "  what lies outside the mask does not change the gradient"
    zeros = [key for key, role in loss.roles.items() if role in ("rewards", "advantages", "token_advantages")]
    if zeros:
        yield f"  {' and '.join(zeros)} are 0: this is the part of the loss that is the KL's"


def _size(level: Level) -> str:
    return f"{level.tokens} tokens, {level.positions} positions, KL {level.kl:.3g}"


def _print_levels(title: str, verdict: GradientIdentity) -> None:
    print(f"{title}; the cosine of its expected gradient with each known one:")
    rows = []
    for level in verdict.levels:
        cosines = (level.cosines[name] for name in KNOWN)
        sizes = (str(level.tokens), str(level.positions), f"{level.kl:.3g}")
        cells = ("-" if cosine is None else f"{cosine:.3f}" for cosine in cosines)
        rows.append((*sizes, f"{level.norm_ratio:.3f}", f"{level.bias:.3f}", *cells))
    print_table(("tokens", "positions", "KL", "norm / KL gradient", "bias", *KNOWN), rows)
