"""Requests of a load: their prompts are drawn anew, so that no cache of prefixes has them."""

from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args

Api = Literal["completions", "chat"]
APIS: tuple[Api, ...] = get_args(Api)
PATHS: dict[Api, str] = {"completions": "/completions", "chat": "/chat/completions"}
MOST_AT_ONCE = 1024  # requests under way where they arrive at a rate
# Ids that every vocabulary has, and whose tokens are no control tokens.
FIRST_ID, IDS = 300, 3000
# Words that are one token of most vocabularies, with the space before them.
WORDS = """
able about above across act add after again age air all also always and animal answer any appear
area ask back ball base be bed before began begin behind best better between big bird black blue
boat body book both box boy bring brought build busy but by call came can car care carry center
change check city class clear close cold color come common complete correct could country course
cover cross cry cut dark day deep did differ dog door down draw drive dry during each early earth
ease east eat end enough even every example eye face fact fall family far farm fast father feel few
field figure fill final find fine fire first fish five fly follow food foot for force form found
four free friend from front full game gave get girl give go gold good got great green ground group
grow had half hand happen hard has have he head hear heat help her here high him his hold home
horse hot hour house how idea if in inch island it just keep kind king know land language large
last late laugh lay lead learn leave left less let letter life light like line list listen little
live long look love low machine made main make man many map mark may mean measure men might mile
mind minute money moon more most mother mountain move much music must name near need never new next
night no north note nothing notice now number object of off often old on once one only open order
other our out over own page paper part pass pattern people perhaps person picture piece place plan
plane plant play point pound power press problem produce product pull question quick rain ran reach
read ready real record red remember rest right river road rock room round rule run said same saw
say school science sea second see seem self sentence serve set several shape she ship short should
show side simple since sing sit six size sleep slow small snow so some song soon sound south space
special spell stand star start state stay step still stood stop story street strong study such sun
sure surface system table take talk teach tell ten test than that the their them then there these
they thing think this those though thought thousand three through time to together told too took
top toward town travel tree true try turn two under unit until up us use usual very voice vowel
wait walk want war warm was watch water way we week weight well went were west what wheel when
where which while white who whole why will wind with wood word work world would write year yes you
young your
"""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Fields that all requests of a load share."""

    model: str  # name that the server knows
    api: Api
    new_tokens: int  # of an answer
    length: int  # words of a prompt, or tokens with `token_ids`
    token_ids: bool = False  # prompts are ids of tokens, which completions alone take
    ignore_eos: bool = True  # the server knows this field, which goes on behind an end


def request_body(shape: RequestShape, random: Random) -> dict[str, Any]:
    """The body of a request for a stream, with a prompt that is drawn now."""
    body: dict[str, Any] = {"model": shape.model, "max_tokens": shape.new_tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if shape.ignore_eos:
        body["ignore_eos"] = True
    if shape.token_ids:
        return body | {"prompt": [FIRST_ID + random.randrange(IDS) for _ in range(shape.length)]}
    text = " ".join(random.choices(WORDS.split(), k=shape.length))
    if shape.api == "completions":
        return body | {"prompt": text}
    return body | {"messages": [{"role": "user", "content": text}]}


def arrivals(rate: float, count: int, random: Random) -> list[float]:
    """Seconds from the beginning at which requests arrive as a Poisson process.

    Args:
        rate: mean of requests a second.
    """
    times, at = [], 0.0
    for _ in range(count):
        at += random.expovariate(rate)
        times.append(at)
    return times
