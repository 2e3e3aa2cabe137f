"""Twenty rows train a policy, which is validated, gone on with, measured and exported.

python examples/train_on_rows.py
"""

from rows import SMALL, rows

import notepad_jax as nj

mine, held_out = rows(0, 20), rows(100, 8)
how = {**SMALL, "steps": 2, "validation.every": 1}
name = nj.train(dataset=mine, validation=held_out, changes=how).folder.name
run = nj.train(dataset=mine, validation=held_out, name=name, resume=True, changes={"steps": 4})
print("reward", [line["reward"] for line in run.metrics if "reward" in line])

measured = nj.evaluate(run.name, step="best", dataset=mine)
for line in measured.by_length:
    print(f"{line.n} questions at {line.length} tokens: {line.accuracy.mean:.0%}")
print(nj.export_hf(run.name, run.folder / "exported", step="best").folder)
