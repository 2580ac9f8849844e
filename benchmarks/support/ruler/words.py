"""The words, numbers and sentences of which the text tasks are made."""

import re
import uuid
from itertools import count
from random import Random

# None of these words is part of another.
WORDS = """
amber ancient angry brave bright bronze busy calm careful cheerful clever cloudy coastal curly curious dapper
daring dusty eager early elegant empty famous fancy fierce foggy fragile frosty gentle giant glossy golden
graceful grumpy handsome happy hasty heavy hidden hollow honest humble hungry jolly juicy keen kind lazy lively
lonely lucky marble merry mighty misty modest muddy narrow neat nervous noble noisy odd orange pale patient plain
playful pretty proud purple quick quiet rapid rare rough round royal rusty salty sandy shallow sharp shiny silent
silky silver simple sleepy slender smooth snowy solid spicy stormy strange striped sturdy sunny sweet swift tall
tender thirsty tidy tiny tough velvet vivid warm wealthy weary wild windy wise wooden young zesty

acorn anchor apple badger bakery balloon banjo basket beaver biscuit bottle bridge bucket butter button cabin
camel candle canyon carpet castle cherry chimney clover cobra coffee comet copper cottage cousin cricket crystal
dancer desert dolphin donkey dragon drummer elbow engine farmer feather ferry fiddle finger flute forest fountain
galaxy garden ginger glacier goblet guitar hammer harbour hazelnut hermit honey horse hunter insect jaguar jigsaw
jungle kitten ladder lagoon lantern lemon leopard lizard lobster magnet mango meadow medal melon mirror monkey
mountain mushroom needle novel oasis onion orchard oyster paddle panther parrot pebble pelican pencil pepper
piano pillow pirate planet pocket potato prairie puzzle quartz rabbit raccoon ribbon river robin rocket saddle
sailor salmon sandal scarf shovel sparrow spider statue sugar summit temple thimble tiger tomato tractor trumpet
tulip tunnel turtle valley violin volcano waffle walnut walrus whistle willow window wizard zebra zipper
"""
ADJECTIVES, NOUNS = (tuple(words.split()) for words in WORDS.split("\n\n"))
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")

# One phrase of each paragraph (who, what, where, when) makes a sentence; no phrase has digits.
PHRASES = """
The baker, A young teacher, The postman, An old sailor, My neighbour, The gardener, A quiet student, The mayor,
A tired nurse, The carpenter, Her cousin, The librarian, A visiting doctor, The farmer, His brother, My aunt

waited for a friend, read the newspaper, mended a wooden chair, drank a cup of tea, fed the ducks, peeled potatoes,
looked for a lost glove, talked about the weather, sold a basket of apples, wrote a long letter, swept the floor,
listened to the radio, repaired a bicycle, planted some onions, told a funny story, took a short nap

near the station, in the kitchen, behind the school, by the river, at the market, in the park, on the balcony,
next to the church, under the bridge, in the old barn, beside the harbour, across the street, at the bus stop

before breakfast, after lunch, in the evening, on Monday, last week, at noon, all afternoon, before the rain came
"""
SENTENCE_PARTS = [re.split(r",\s+", phrases) for phrases in PHRASES.strip().split("\n\n")]


def draw_sentence(rng: Random) -> str:
    """Draw a sentence of the haystack."""
    return " ".join(map(rng.choice, SENTENCE_PARTS)) + "."


def draw_words(rng: Random, number: int) -> list[str]:
    """Draw different words, such as "quiet-lantern"; where these do not suffice, with two adjectives."""
    for length in count(1):
        size = len(ADJECTIVES) ** length * len(NOUNS)
        if number <= size // 2:
            break
    return [_compound(index, length) for index in rng.sample(range(size), number)]


def _compound(index: int, length: int) -> str:
    index, noun = divmod(index, len(NOUNS))
    words = [NOUNS[noun]]
    for _ in range(length):
        index, adjective = divmod(index, len(ADJECTIVES))
        words.insert(0, ADJECTIVES[adjective])
    return "-".join(words)


def draw_numbers(rng: Random, number: int) -> list[str]:
    """Draw different numbers of seven digits."""
    return [str(value) for value in rng.sample(range(10**6, 10**7), number)]


def draw_uuids(rng: Random, number: int) -> list[str]:
    """Draw different identifiers of 36 characters."""
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(number)]
