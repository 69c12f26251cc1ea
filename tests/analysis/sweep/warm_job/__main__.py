import json
import os
import sys
from pathlib import Path

if sys.argv[1:] == ["check"]:
    answer = {"module": "WarmModule", "estimator": None, "evaluation": {}}
    json.dump([answer for _ in json.load(sys.stdin)], sys.stdout)
elif __name__ == "__main__":
    warm = "torch" in sys.modules
    import torch

    from warm_job.cli import lightning as cli

    run = Path(sys.argv[sys.argv.index("--trainer.default_root_dir") + 1])
    print(json.dumps({"warm": warm, "imported_by": cli.IMPORTED_BY, "pid": os.getpid(), "argv": sys.argv}))
    final = {"threads": torch.get_num_threads(), **cli.numbers()}
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()
    (run / "summary.json").write_text(json.dumps({"state": "done", "final": final, "versions": {}}))
