"""Many questions at once: readings that run together share the engine, and a document's chunks.

python examples/many_questions.py
"""

import asyncio

from rows import rows

import notepad_jax as nj


async def main() -> None:
    story = nj.TextDocument(rows(4, 1)[0]["document"])
    people = ("Selma", "Ida", "Oscar", "Leo", "Emil", "Hanna")
    with nj.Reader.load("data/starter") as reader:
        asked = [reader.aread(story, f"code of {name} ?") for name in people]
        for name, reading in zip(people, await asyncio.gather(*asked), strict=True):
            print(f"{name}: {reading.answer}")


asyncio.run(main())
