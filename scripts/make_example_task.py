#!/usr/bin/env python3
"""Write the task that ships with sweep: everyday.jsonl, simple questions of which a 135M model answers most.

    scripts/make_example_task.py        rewrites sweep/measure/quality/task_files/everyday.jsonl, always the same

One line is one item: {"question", "choices", "answer"}, three choices, answer the index of the right one. The items are
facts and words that everybody knows, written for this file. It is an example of an offline task and a thermometer for
tests; what your deployment is worth, your own tasks say.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

TARGET = Path(__file__).parents[1] / "sweep" / "measure" / "quality" / "task_files" / "everyday.jsonl"

# question with {} -> "word:answer" pairs; the wrong choices are answers of other pairs of the same question.
PAIRS = {
    "The opposite of {} is": """hot:cold big:small up:down day:night black:white early:late open:closed happy:sad
        fast:slow hard:soft rich:poor young:old full:empty heavy:light long:short wet:dry clean:dirty strong:weak
        left:right first:last true:false love:hate war:peace loud:quiet high:low thick:thin sweet:sour buy:sell
        win:lose near:far above:below inside:outside""",
    "The capital of {} is": """France:Paris Italy:Rome Germany:Berlin Spain:Madrid Japan:Tokyo China:Beijing
        Russia:Moscow England:London Egypt:Cairo Greece:Athens Portugal:Lisbon Austria:Vienna Poland:Warsaw Norway:Oslo
        Sweden:Stockholm Ireland:Dublin Cuba:Havana Peru:Lima Canada:Ottawa Kenya:Nairobi Turkey:Ankara Iran:Tehran""",
    "The month after {} is": """January:February February:March March:April April:May May:June June:July July:August
        August:September September:October October:November November:December""",
    "The day after {} is": """Monday:Tuesday Tuesday:Wednesday Wednesday:Thursday Thursday:Friday Friday:Saturday
        Saturday:Sunday Sunday:Monday""",
    "The number after {} is": """one:two two:three three:four four:five five:six six:seven seven:eight eight:nine
        nine:ten ten:eleven eleven:twelve twelve:thirteen""",
    "A baby {} is called a": """cat:kitten dog:puppy cow:calf sheep:lamb horse:foal lion:cub duck:duckling pig:piglet
        bear:cub goat:kid""",
    "A {} is a kind of": """carrot:vegetable eagle:bird salmon:fish hammer:tool rose:flower oak:tree piano:instrument
        bus:vehicle shirt:garment mosquito:insect tiger:animal chair:furniture diamond:gem apple:fruit potato:vegetable
        violin:instrument sparrow:bird trout:fish pine:tree truck:vehicle ant:insect sofa:furniture tulip:flower
        banana:fruit screwdriver:tool jacket:garment ruby:gem wolf:animal""",
    "The color of {} is": """grass:green blood:red snow:white coal:black chocolate:brown sunflowers:yellow""",
    "You use {} to": """scissors:cut pens:write soap:wash needles:sew ovens:bake brooms:sweep cameras:photograph
        shovels:dig telephones:call keys:unlock""",
    "A person who {} is a": """teaches:teacher paints:painter flies:pilot sings:singer cooks:chef writes:writer
        farms:farmer dances:dancer drives:driver swims:swimmer""",
    "The children walked to the {} to": """library:read river:swim kitchen:eat bedroom:sleep stage:sing shop:buy""",
    "Two plus {} equals": """one:three two:four three:five four:six five:seven six:eight seven:nine eight:ten""",
    "Ten minus {} equals": """one:nine two:eight three:seven four:six five:five six:four seven:three eight:two""",
}
# question with {} -> "word:right/wrong/wrong"
FORMS = {
    "The plural of {} is": """mouse:mice/mouses/mouse child:children/childs/childrens
        foot:feet/foots/foot tooth:teeth/tooths/tooth man:men/mans/man woman:women/womans/womens
        goose:geese/gooses/goose leaf:leaves/leafs/leaf knife:knives/knifes/knife city:cities/citys/city
        box:boxes/boxs/box baby:babies/babys/baby wolf:wolves/wolfs/wolf potato:potatoes/potatos/potato
        ox:oxen/oxes/ox""",
    "The past tense of {} is": """go:went/goed/gone take:took/taked/taken see:saw/seed/seen eat:ate/eated/eaten
        run:ran/runned/run write:wrote/writed/written give:gave/gived/given sing:sang/singed/sung come:came/comed/come
        know:knew/knowed/known begin:began/beginned/begun break:broke/breaked/broken drive:drove/drived/driven
        fly:flew/flied/flown speak:spoke/speaked/spoken swim:swam/swimmed/swum""",
}


def items() -> list[dict[str, object]]:
    rng = random.Random(0)
    made = []
    for question, text in PAIRS.items():
        pairs = [entry.split(":") for entry in text.split()]
        for word, right in pairs:
            others = sorted({answer for _, answer in pairs} - {right})
            made.append(item(rng, question.format(word), right, rng.sample(others, 2)))
    for question, text in FORMS.items():
        for entry in text.split():
            word, _, choices = entry.partition(":")
            right, *wrong = choices.split("/")
            made.append(item(rng, question.format(word), right, wrong))
    rng.shuffle(made)
    return made


def item(rng: random.Random, question: str, right: str, wrong: list[str]) -> dict[str, object]:
    choices = [right, *wrong]
    rng.shuffle(choices)
    return {"question": question, "choices": choices, "answer": choices.index(right)}


if __name__ == "__main__":
    lines = [json.dumps(entry) for entry in items()]
    TARGET.write_text("\n".join(lines) + "\n")
    print(f"{TARGET}: {len(lines)} items")
