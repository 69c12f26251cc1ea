"""A server on the loopback that speaks the protocol of vLLM's completions, with a model of transformers."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import torch


class TeacherServer(ThreadingHTTPServer):
    """Answers with the model's log-probabilities, or with what `spoil` makes of the answer.

    Args:
        model: The teacher.
        decode: The text of a token; None for a teacher whose tokenizer is not compared.
        port: Where it listens; 0 for any.
        answers: The number of completions after which it refuses all connections; None for no end.
    """

    daemon_threads = True

    def __init__(self, model, decode=str, port=0, answers=None):
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.decode, self.answers = model, decode, answers
        self.known = {}  # completions repeat
        self.questions, self.names, self.spoil = [], ["teacher"], lambda answer: answer
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __exit__(self, *error):
        self.shutdown()
        super().__exit__(*error)

    @torch.no_grad()
    def completions(self, question):
        k = question["prompt_logprobs"]
        choices = [
            {"index": index, "text": "", "prompt_logprobs": self.positions(prompt, k)}
            for index, prompt in enumerate(question["prompt"])
        ]
        return {"object": "text_completion", "choices": choices[::-1]}

    def positions(self, prompt, k):
        if (*prompt, k) not in self.known:
            self.known[*prompt, k] = [None, *self.compute(prompt, k)]
        return self.known[*prompt, k]

    def compute(self, prompt, k):
        tokens = torch.tensor([prompt])
        logits = self.model(tokens, attention_mask=torch.ones_like(tokens)).logits[0, :-1]
        logprobs = logits.double().log_softmax(-1)
        order = logprobs.argsort(-1, descending=True).tolist()
        for row, ranked, token in zip(logprobs.tolist(), order, prompt[1:], strict=True):
            tokens = dict.fromkeys([token, *ranked[:k]])
            yield {
                str(t): {"logprob": row[t], "rank": rank, "decoded_token": self.decode(t)}
                for rank, t in enumerate(tokens)
            }


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == "/v1/models"
        self.answer({"object": "list", "data": [{"id": name} for name in self.server.names]})

    def do_POST(self):
        assert self.path == "/v1/completions"
        server = self.server
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert question["max_tokens"] == 1
        if server.answers is not None and len(server.questions) >= server.answers:
            self.close_connection = True
            return
        server.questions.append(question)
        self.answer(server.spoil(server.completions(question)))

    def answer(self, answer, code=200):
        if isinstance(answer, tuple):
            code, answer = answer
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(code)
        if 300 <= code < 400:
            self.send_header("Location", "file:///etc/hostname")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
