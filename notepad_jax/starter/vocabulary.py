"""The words of the synthetic language, and a tokenizer that knows each of them whole.

`synthetic.py` writes its documents with these lists and nothing else. Every word is one
piece of the sentencepiece model built here, so that a sentence of eight words is eight
tokens and a tiny network need not learn to spell. Any other text still goes through,
byte by byte (byte fallback). The piece ids are fixed by the order of `PIECES`, therefore
programs/warmup.py can write token ids without a tokenizer, and a rebuilt model is equal
to the shipped one, byte for byte. Control pieces are what a template may contain and a
document may not: sentencepiece never produces them from ordinary text.
"""

from __future__ import annotations

from sentencepiece import sentencepiece_model_pb2

NAMES = tuple(
    "Ada Amos Anna Basil Bella Boris Carl Celia Clara Conrad Daisy Dora Edgar Elsa Emil Esther "
    "Felix Flora Frida Greta Gustav Hanna Hugo Ida Iris Ivan Jonas Julia Karin Leo Lena Lukas "
    "Mabel Marta Milo Nora Olga Oscar Otto Paula Petra Rosa Rufus Selma Sofia Tilda "
    "Viktor Wanda".split()
)
TOWNS = tuple(
    "Ashford Barrow Birkdale Blackpool Brackley Bramley Burford Calder Corby Cranleigh Dalton "
    "Dunmore Elmswell Fairhaven Farley Glenrock Greendale Halden Hartwell Hazelton Inverness "
    "Kelby Kendal Kirkwall Lakeside Langport Linton Marlow Melrose Milford Newhaven Norwood "
    "Oakham Ottery Penrith Redcliff Ripley Rosedale Selby Sherwood Stanmore Stonebridge Thornbury "
    "Upton Wakefield Westbrook Whitby Windermere".split()
)
CODES = tuple(
    "acorn almond amber anchor arrow badger beacon birch cactus candle canyon cedar cobalt comet "
    "copper coral crimson crystal dagger dolphin eagle ember falcon fern garnet ginger granite "
    "hammer hazel indigo ivory jasmine juniper lantern lilac maple marble meteor nectar onyx opal "
    "orchid pepper quartz raven saffron tulip velvet".split()
)
RULERS = tuple(
    "Adalric Agnar Alaric Aldous Anselm Athelstan Baldwin Beatrix Berengar Bertrand Cedric "
    "Clovis Cnut Drogo Edmund Edwin Eleanor Ermengard Ethelred Fulk Galahad Godfrey Gunther "
    "Harald Hildegard Isolde Lothar Ludmila Magnus Manfred Matilda Merovech Odo Olaf Oswald "
    "Ottokar Pepin Philippa Radbod Rollo Roderick Sancho Sigmund Theodora Theodoric Ulric "
    "Wenceslas Yolanda".split()
)
ADJECTIVES = tuple(
    "old young quiet gentle clever weary cheerful patient broken famous golden heavy lonely "
    "narrow painted silver".split()
)
PEOPLE = tuple(
    "baker farmer fisher gardener hunter miller painter pilgrim poet sailor shepherd singer "
    "soldier tailor teacher widow".split()
)
ANIMALS = tuple("cat dog donkey fox goat horse owl sheep".split())
PLACES = tuple(
    "bridge castle church forest garden harbour hill market meadow mill orchard river".split()
)
THINGS = tuple(
    "barrel basket bell blanket boat chair clock door fiddle kettle ladder lamp mirror table "
    "wagon wheel".split()
)
MOTIONS = tuple("hurried limped ran rode strolled turned walked wandered".split())
SEASONS = tuple("autumn spring summer winter".split())
TIMES = tuple("dawn dusk evening midnight morning night noon sunset".split())
FOODS = tuple("apples barley beans bread butter cheese honey onions".split())

# Words that stand at fixed places in a sentence, a question or a memory.
FIXED = tuple(
    "the secret code of is . for many years now inhabits proud people obey here begins a new "
    "chapter story ? ruler obeys nothing toward slept beside rain fell softly on nobody knew why "
    "was every sang songs say that later sold they ate and until".split()
)

CONTROLS = (
    "<|end|>", "<|question|>", "<|memory|>", "<|write|>", "<|answer|>", "<|keep|>", "<|chunk|>",
)  # fmt: skip
_SPECIAL = ("<pad>", "<unk>", *CONTROLS)
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
WORDS = (
    *FIXED, *NAMES, *TOWNS, *CODES, *RULERS, *ADJECTIVES, *PEOPLE, *ANIMALS, *PLACES, *THINGS,
    *MOTIONS, *SEASONS, *TIMES, *FOODS,
)  # fmt: skip

# Words first, bytes last: ids below `len(_SPECIAL) + len(WORDS)` are all this language needs.
PIECES = (*_SPECIAL, *("▁" + word for word in WORDS), "▁", *_BYTES)
ID_OF = {piece.removeprefix("▁") or "▁": index for index, piece in enumerate(PIECES)}


def ids(text: str) -> list[int]:
    """Token ids of space-separated words and control pieces; KeyError for an unknown word."""
    return [ID_OF[word] for word in text.split()]


def sentencepiece_model() -> bytes:
    """The starter's tokenizer.model, a ModelProto: unigram, byte fallback, one piece a word."""
    model = sentencepiece_model_pb2.ModelProto()
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece.Type
    for piece in PIECES:
        if piece == "<unk>":
            kind, score = kinds.UNKNOWN, 0.0
        elif piece in _SPECIAL:
            kind, score = kinds.CONTROL, 0.0
        elif piece in _BYTES:
            kind, score = kinds.BYTE, 0.0
        else:
            kind, score = kinds.NORMAL, -1.0
        model.pieces.add(piece=piece, score=score, type=kind)
    trainer = model.trainer_spec
    trainer.model_type = sentencepiece_model_pb2.TrainerSpec.ModelType.UNIGRAM
    trainer.vocab_size = len(PIECES)
    trainer.byte_fallback = True
    trainer.pad_id, trainer.unk_id, trainer.bos_id = 0, 1, -1
    trainer.eos_id = ID_OF["<|end|>"]
    trainer.pad_piece, trainer.unk_piece, trainer.eos_piece = "<pad>", "<unk>", "<|end|>"
    normaliser = model.normalizer_spec
    normaliser.name = "identity"
    normaliser.add_dummy_prefix = True
    normaliser.remove_extra_whitespaces = True
    normaliser.escape_whitespaces = True
    return model.SerializeToString(deterministic=True)
