"""`lit-klrb certify MODULE:FUNCTION`: which known gradient a KL loss has, by enumeration."""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import torch
import yaml

from lit_klrb.cli.arguments import Arguments
from lit_klrb.cli.gradients import as_json, conclude, describe, explain_names, print_levels, size
from lit_klrb.cli.loss_roles import ROLES, TEACHER_K, BoundLoss
from lit_klrb.errors import ConfigurationError, error_line, printable, refusing
from lit_klrb.estimators.certificate import Certificate, certify
from lit_klrb.estimators.enumerated_loss import KNOWN, LossError
from lit_klrb.estimators.identity import TOLERANCE, ZERO
from lit_klrb.reward_functions import import_member
from lit_klrb.terminal import print_lines

CLAIMS = (*KNOWN, ZERO)
# Claims that more than the gradient of that name fulfils: the other direction, of completions or of tokens.
FULFILLED_BY = {"reverse": ("reverse", "reverse_own_token")}
NORMALISATIONS = {
    "batch": "averaged over the batch's tokens: biased for small batches, unbiased as batches grow",
    "length": "each completion's loss is divided by its own length, which biases batches of any size",
}
EPILOG = f"""The function is imported, which runs its module, and called on all completions of six pairs of
small models, alone and in pairs. Parameters are recognised by name, such as per_token_logps, ref_log_prob,
student_logits, teacher_topk_ids, response_mask; --argument names the role of others:
{", ".join(ROLES)}.
kl_rewards and token_kl_rewards are minus the log ratio of the completion and of each token, for a loss whose
rewards contain the KL; a teacher's top k are its {TEACHER_K} most likely tokens.
It returns a scalar, a loss per completion or per token, or a tuple that starts with one of them.

exit codes: 0, with --claims only if it has the claimed gradient; 1 if not, or if the function raises;
2 wrong usage

example: lit-klrb certify my_losses:kl_loss --claims kl --option beta=0.1
"""


def parser() -> Arguments:
    """The parser of the command's options."""
    command = Arguments("certify", __doc__, EPILOG)
    add = command.add_argument
    add("function", metavar="MODULE:FUNCTION", help="a loss of log-probabilities or logits of both models")
    add("--claims", choices=CLAIMS, help="the gradient that it must have; reverse is either form of it")
    add("--argument", action="append", default=[], metavar="NAME=ROLE", help="what a parameter is")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="the value of a parameter")
    add("--json", action="store_true", help="print JSON, with the cosines with all known gradients")
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
        certificate = certify(loss, takes_mask=loss.takes_mask, takes_old=loss.takes_old)
    except LossError as error:
        print(error_line(f"{options.function} failed: {error}"), file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_as_json(loss, certificate, options.claims), indent=2))
    else:
        _print_page(loss, certificate, options.claims)
    return int(options.claims is not None and not has_gradient(certificate, options.claims))


def has_gradient(certificate: Certificate, claim: str) -> bool:
    """Whether a loss has the gradient on-policy, times a positive factor, whatever the padding holds."""
    verdict = certificate.on_policy
    return (
        verdict.name in FULFILLED_BY.get(claim, (claim,))
        and verdict.normalisation != "length"
        and (claim == ZERO or verdict.scale > 0)
        and certificate.padding <= TOLERANCE
    )


def _pairs(key: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"NAME=VALUE is expected, got {text}", key=key)
        yield name, value


def _as_json(loss: BoundLoss, certificate: Certificate, claim: str | None) -> dict[str, Any]:
    gradients = {key: as_json(getattr(certificate, key)) for key in ("on_policy", "off_policy", "alone")}
    about = {"loss": loss.name, "roles": loss.roles, "returns": loss.returned}
    held = {} if claim is None else {"claim": claim, "holds": has_gradient(certificate, claim)}
    return about | certificate._asdict() | gradients | held


def _print_page(loss: BoundLoss, certificate: Certificate, claim: str | None) -> None:
    print_lines(f"gradient: {describe(certificate.on_policy)}", *explain_names(certificate.on_policy))
    if claim is not None:
        print(f"the claimed one, {claim}: {'yes' if has_gradient(certificate, claim) else 'NO'}")
    print_lines(f"{conclude(certificate.on_policy)}\n")
    print_levels(certificate.on_policy)
    print()
    if certificate.off_policy is not None:
        print_lines(f"with completions of another policy: {describe(certificate.off_policy)}")
        print_lines(f"  {conclude(certificate.off_policy)}")
    for line in _remarks(loss, certificate):
        print_lines(printable(line))


def _remarks(loss: BoundLoss, result: Certificate) -> list[str]:
    gradient = result.on_policy
    clamped = [size(level) for i, level in enumerate(gradient.levels) if i not in gradient.agrees_at]
    zeros = [key for key, role in loss.roles.items() if role in ("rewards", "advantages", "token_advantages")]
    reads = [key if key == role else f"{key} ({role})" for key, role in loss.roles.items()]
    outside, failed = result.padding > TOLERANCE, result.alone_error
    remarks = {
        NORMALISATIONS.get(gradient.normalisation, ""): gradient.normalisation in NORMALISATIONS,
        f"a part is clamped or left out with {'; '.join(clamped)}": gradient.agrees_at and clamped,
        "the loss does not depend on the policy: is it detached?": not result.depends,
        f"in batches of one completion: {result.alone and describe(result.alone)}": result.alone,
        f"batches of one completion fail ({failed}): batches of two were tried": failed,
        "it takes no mask: single completions without padding were tried": not result.paired,
        "completions of a batch are summed, not averaged: the scale grows with the batch": result.over_batch,
        "divided by the number of positions, with padding: the scale changes with that": result.over_width,
        f"what lies outside the mask CHANGES the gradient, by {result.padding:.2g} of its size": outside,
        f"{' and '.join(zeros)} are 0: this is the part of the loss that is the KL's": zeros,
        f"{loss.name} reads {', '.join(reads)} and returns {loss.returned}": True,
    }
    return [remark for remark, applies in remarks.items() if applies]
