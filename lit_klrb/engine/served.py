"""A teacher in an engine of its own, which sends log-probabilities of its k most likely tokens.

The protocol is that of vLLM's OpenAI-compatible server: POST /completions with token ids as prompts and
`prompt_logprobs`, whose answer has, at each position of a prompt, the k most likely tokens and the prompt's.
"""

import json
import logging
import math
import re
import time
from contextlib import AbstractContextManager, closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_klrb.errors import ConfigurationError, NoAnswerError, brief, refusing
from lit_klrb.models.rollout import Rollout

log = logging.getLogger(__name__)
# The number of log-probabilities that vLLM sends without --max-logprobs.
DEFAULT_K = 20
# Seconds to wait before each further attempt.
PAUSES = (1.0, 5.0, 25.0)
# Mean difference in nats up to which log-probabilities are of one teacher, on any machine, in any precision.
_SAME = 0.5
# Sequences per request, and tokens by which tokenizers are compared.
_ROWS, _COMPARED = 16, 32
# How far log-probabilities may be above 0, and probabilities sum to more than 1, by rounding.
_ROUNDING = 1e-3
_ADDRESS = re.compile(r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:\d{1,5})?(/[\w./-]*)?")


def is_address(path: str | None) -> bool:
    """Whether a path is the address of a served model."""
    return path is not None and path.startswith(("http://", "https://"))


def check_address(address: str) -> None:
    """Check the address of a served model.

    Raises:
        ConfigurationError: If it has other parts than a host, a port and a path; user names, passwords and
            keys are not printed.
    """
    if not _ADDRESS.fullmatch(address):
        shown = re.sub(r"(?<=//).*@|[?#].*", "***", address, flags=re.DOTALL)
        raise ConfigurationError(
            f"{shown} is not an address such as http://127.0.0.1:8000/v1", key="reference_path"
        )


class ServedTeacher:
    """Log-probabilities of a served teacher, for `served_stats`.

    A request that fails, is late or meets an error of the server is tried four times. Redirects are not
    followed, proxies not used, and only http and https are spoken.

    Args:
        address: Where the API begins, such as http://127.0.0.1:8000/v1.
        k: Number of most likely tokens at each position.
        vocabulary: V, the size of the policy's vocabulary.
        model: The name of the teacher on its server; None for the only one.
        timeout: Seconds of silence after which an answer is late.

    Raises:
        ConfigurationError: If the server does not answer, or has several models and none is named.
    """

    def __init__(self, address: str, k: int, vocabulary: int, model: str | None, timeout: float) -> None:
        self.address, self.k, self.vocabulary, self.timeout = address, k, vocabulary, timeout
        check_address(address)
        self.model = model or self._only_model()
        # Its log-probabilities of fixed tokens, by which it is recognised
        self.probe: list[float] = []

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """The sampled token and the head at each position of the completions.

        Args:
            rollout: B sequences with T completion positions, after the prompts that the teacher reads.

        Returns:
            Token ids and their log-probabilities, of the sampled token and of the k most likely, float64,
            shape [B, T, 2, 1 + k]; 0 outside the mask.
        """
        result = torch.zeros(*rollout.mask.shape, 2, 1 + self.k, dtype=torch.float64)
        rows = zip(rollout.tokens.cpu(), rollout.attention_mask.bool().cpu(), strict=True)
        sequences = [tokens[kept].tolist() for tokens, kept in rows]
        lengths = rollout.mask.sum(1).tolist()
        for row, positions in enumerate(self._positions(sequences)):
            last = slice(len(positions) - lengths[row], None)
            pairs = zip(positions[last], sequences[row][last], strict=True)
            heads = [self._head(*pair) for pair in pairs]
            result[row, : lengths[row]] = torch.tensor(heads, dtype=result.dtype)
        return result.to(rollout.tokens.device)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare the texts of tokens from the whole vocabulary with those that the server decodes.

        Raises:
            ConfigurationError: If they differ, or its log-probabilities from those of the call before.
        """
        size = min(len(tokenizer), self.vocabulary)
        special = set(tokenizer.all_special_ids)
        tokens = [token for token in range(0, size, -(-size // _COMPARED)) if token not in special]
        probe: list[float] = []
        # The first position of a prompt has no log-probabilities
        _, *positions = self._positions([[tokens[0], *tokens]])[0]
        for token, position in zip(tokens, positions, strict=True):
            with self._reading():
                served_text, policy_text = (
                    position[str(token)]["decoded_token"],
                    str(tokenizer.decode([token])),
                )
                probe.append(float(position[str(token)]["logprob"]))
            # A part of a character has no text of its own
            if (
                "\ufffd" not in f"{served_text}{policy_text}"
                and str(served_text).strip() != policy_text.strip()
            ):
                raise self._error(
                    f"has another tokenizer than the policy: id {token} is {served_text!r} there and "
                    f"{policy_text!r} in the policy; a KL between them needs the same vocabulary"
                )
        self.probe = self.probe or probe
        self.check_same(probe)

    def check_same(self, probe: object) -> None:
        """Check that this is the teacher of an earlier run, by its log-probabilities of the same tokens."""
        if not isinstance(probe, list) or len(probe) != len(self.probe):
            return  # of an earlier version, or with another vocabulary, which the tokenizer shows
        apart = fmean(abs(one - other) for one, other in zip(probe, self.probe, strict=True))
        if not apart <= _SAME:
            raise self._error(
                "is not the teacher of this run: its log-probabilities of the same tokens differ by "
                f"{apart:.2g} nats on average"
            )

    def _only_model(self) -> str:
        answer = self._ask("models")
        with self._reading():
            names = [str(model["id"]) for model in answer["data"]]
        if len(names) != 1:
            raise self._error(f"serves {', '.join(names) or 'no model'}; name the teacher", "served_model")
        return names[0]

    def _positions(self, sequences: list[list[int]]) -> list[list[Any]]:
        """The server's log-probabilities at each position of each sequence."""
        positions: list[list[Any]] = []
        for start in range(0, len(sequences), _ROWS):
            part = sequences[start : start + _ROWS]
            question = {"model": self.model, "prompt": part, "max_tokens": 1, "prompt_logprobs": self.k}
            answer = self._ask("completions", question)
            with self._reading():
                choices = {choice["index"]: choice["prompt_logprobs"] for choice in answer["choices"]}
                positions += [choices[index] for index in range(len(part))]
                lengths = list(map(len, positions[start:]))
            if lengths != list(map(len, part)):
                raise self._error(f"sends {lengths} positions for sequences of {list(map(len, part))} tokens")
        return positions

    def _head(self, position: Any, token: int) -> list[list[float]]:
        """Tokens and log-probabilities, the sampled token first."""
        with self._reading():
            logprobs = {int(name): float(entry["logprob"]) for name, entry in position.items()}
            if [*map(str, logprobs)] != [*position]:  # such as 1 and 01
                raise ValueError(f"tokens {', '.join(position)}")
        # The server adds the sampled token to the k most likely. The head must not depend on it
        head = {t: value for t, value in logprobs.items() if t != token or len(logprobs) == self.k}
        if token not in logprobs or len(head) != self.k:
            raise self._error(
                f"sends {len(logprobs)} log-probabilities at a position, where the {self.k} largest and that "
                f"of token {token} were asked for"
            )
        if not all(0 <= other < self.vocabulary for other in logprobs):
            raise self._error(
                f"sends token {max(logprobs)}; the policy's vocabulary has {self.vocabulary}, and a KL "
                "between them needs the same"
            )
        valid = all(math.isfinite(value) and value <= _ROUNDING for value in logprobs.values())
        if not valid or sum(map(math.exp, logprobs.values())) > 1 + _ROUNDING:
            raise self._error(f"sends {list(logprobs.values())[:3]} as log-probabilities")
        if token not in head and logprobs[token] > min(head.values()) + _ROUNDING:
            raise self._error(f"sends a head without token {token}, which is more likely than others in it")
        return [[token, *head], [logprobs[token], *head.values()]]

    def _ask(self, path: str, question: dict[str, Any] | None = None) -> Any:
        """The decoded answer to a request, after several attempts if need be."""
        reason = ""
        for pause in (0.0, *PAUSES):
            if pause:
                log.warning("%s: %s; next attempt in %g s", self.address, reason, pause)
                time.sleep(pause)
            try:
                return json.loads(self._read(path, question))
            except ConfigurationError:
                raise
            except (OSError, HTTPException, ValueError, OverflowError, RecursionError) as error:
                reason = brief(error)
        raise NoAnswerError(
            f"{self.address} does not answer as a teacher ({reason}); start it", key="reference_path"
        )

    def _read(self, path: str, question: dict[str, Any] | None) -> bytes:
        """The bytes of an answer."""
        parts = urlsplit(self.address)
        protocol = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        http = protocol(parts.hostname or "", parts.port, timeout=self.timeout)
        with closing(http):
            data = None if question is None else json.dumps(question)
            headers = {"Content-Type": "application/json", "Connection": "close"}
            target = f"{parts.path.rstrip('/')}/{path}"
            http.request("GET" if data is None else "POST", target, data, headers)
            with http.getresponse() as response:
                if response.status != 200:
                    reason = f"{response.status}: {response.read(2000).decode(errors='replace')}"
                    if response.status >= 500:
                        raise OSError(reason)
                    raise self._error(f"refuses a request, {brief(ValueError(reason))}")
                return response.read()

    def _reading(self) -> AbstractContextManager[None]:
        """Anything may be sent in place of the answer."""
        kinds = AttributeError, LookupError, TypeError, ValueError, OverflowError
        message = f"{self.address} does not send the prompt_logprobs of vLLM's completions"
        return refusing(message, *kinds, key="reference_path")

    def _error(self, message: str, key: str = "reference_path") -> ConfigurationError:
        return ConfigurationError(f"{self.address} {message}", key=key)
