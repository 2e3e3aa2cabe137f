"""A document of any length, read chunk by chunk; the memory, and the answer from it alone.

python examples/read.py
"""

from pathlib import Path

from rows import rows

import notepad_jax as nj

story = rows(2, 1)[0]
Path("runs").mkdir(exist_ok=True)
Path("runs/story.txt").write_text(story["document"])

# Or a run ("runs/mine", step="best"), a Hugging Face folder, "http://localhost:8000/v1".
with nj.Reader.load("data/starter", changes={"evaluate.chunk_size": 128}) as reader:
    reading = reader.read("runs/story.txt", story["question"])

for memory in reading.memories:
    print(f"after chunk {memory.chunk}: {memory.text}")
print(f"{story['question']} {reading.answer}; right: {story['answers']}")
print("worth", nj.score(reading.answer, story["answers"], metric="em"))
