"""The fleet's rule under random kills, joins and partitions: a model without jax, files or clocks.

Trainer and readers are generators that yield wherever a kill could come; a seeded scheduler picks
who goes on, who is killed and begun again, who freezes for a while and goes on later with what it
knew, who joins and who leaves. Names and decisions are `rollout.schedule`'s own; weights are a hash
of everything that was ever learnt.
"""

import dataclasses
import functools
import hashlib
import random

import pytest

from notepad_jax.rollout import schedule
from notepad_jax.rollout.schedule import Bundle, Plan

LAST = 6  # steps of a run
parsed = functools.cache(schedule.parsed)


def digest(*what):
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


class Store:
    """Objects under names; it minds what nobody may do."""

    def __init__(self, once=(schedule.SPOOL, schedule.PLAN, "policy/")):
        self.once = once  # kinds that are the same whoever puts them
        self.there = {}
        self.kinds = {}  # of each kind, what its names are without it
        self.ever = {}  # of what is put once

    def put(self, name, content):
        if name in self.there:
            return False
        if name.startswith(self.once):
            assert self.ever.setdefault(name, content) == content, f"{name} has other bits"
        self.replace(name, content)
        return True

    def replace(self, name, content):
        self.there[name] = content
        kind, _, rest = name.partition("/")
        self.kinds.setdefault(kind, {})[rest] = None

    def get(self, name):
        return self.there.get(name)

    def remove(self, name):
        if self.there.pop(name, None) is not None:
            kind, _, rest = name.partition("/")
            del self.kinds[kind][rest]

    def names(self, kind=""):
        return [name for name in self.there if name.startswith(kind)] if kind else [*self.there]

    def numbers(self, kind):
        return list(map(int, self.kinds.get(kind, ())))


@dataclasses.dataclass(frozen=True)
class Rules:
    """One run, and what a mutation does wrong."""

    seed: int = 0
    draws: int = 3  # a step
    parts: int = 2
    lead: int = 1
    every: int = 2  # steps between two saves
    wrong: str = ""

    def turns(self, ordinal):
        return 1 + min(9, int(random.Random(digest(self.seed, ordinal)).paretovariate(1.2)))

    def reads(self, step):
        version = schedule.reads(step, self.lead)
        return max(0, version - 1) if self.wrong == "older" else version


def reader(store, rules, me):
    while True:
        names = store.names()
        if schedule.ENDED in names:
            return
        plans = [parsed(store.get(f"{schedule.PLAN}/{step}"))
                 for step in schedule.of_kind(names, schedule.PLAN)]  # fmt: skip
        by = schedule.claimed(names)
        claims = {bundle: [store.get(one) for one in each] for bundle, each in by.items()}
        read = schedule.of_kind(names, schedule.SPOOL)
        if rules.wrong == "no second claims":
            read = [*read, *(bundle for bundle, each in claims.items() if each[-1] != me)]
        bundle = schedule.chosen(plans, read, claims, me)
        if bundle is None:
            yield "idle"
            continue
        yield "before claim"
        claim = f"{schedule.CLAIM}/{bundle.name}-{len(by.get(bundle.name, ()))}"
        if not store.put(claim, me):
            continue
        yield "claimed"
        newest = max(store.numbers("policy"))
        version = newest if rules.wrong == "newest" else bundle.version
        weights = store.get(f"policy/{version}")
        if weights is None:
            assert bundle.step <= max(store.numbers("save")), "a version that is needed is gone"
            continue
        assert version == schedule.reads(bundle.step, rules.lead) or rules.wrong
        wanted = [(o, k) for o in bundle.ordinals for k in range(rules.turns(o))]
        said = list(store.get(f"{schedule.PROGRESS}/{bundle.name}") or ())
        while len(said) < len(wanted):
            said.append((*wanted[len(said)], version, digest(rules.seed, said, weights)))
            yield "turn"
            if len(said) % 3 == 0:
                store.replace(f"{schedule.PROGRESS}/{bundle.name}", tuple(said))
                yield "kept"
            if store.get(f"{schedule.SPOOL}/{bundle.name}"):
                break
        else:
            yield "before spool"
            if rules.wrong == "replaced":
                store.replace(f"{schedule.SPOOL}/{bundle.name}", (*said, me))
            else:
                store.put(f"{schedule.SPOOL}/{bundle.name}", tuple(said))
            yield "spooled"


class Superseded(Exception):
    pass


def trainer(store, rules, learnt):
    """Yields where it could be killed; `learnt` is told (step, ordinals, versions) as it learns."""
    life = 1 + max(store.numbers("life"), default=0)
    assert store.put(f"life/{life}", "")

    def alive():
        if max(store.numbers("life")) > life and rules.wrong != "no fence":
            raise Superseded

    if not store.numbers("save"):
        store.put("save/0", ("init", 0))
        yield "first saved"
    step = saved = max(store.numbers("save"))
    weights, first = store.get(f"save/{saved}")
    while True:
        alive()
        if not store.put(f"policy/{step}", weights):
            assert store.get(f"policy/{step}") == weights, f"version {step} has other bits"
        yield "published"
        alive()
        for number, one in enumerate(schedule.open_steps(step, rules.lead, LAST)):
            begin = first + number * rules.draws
            ordinals = range(begin, begin + rules.draws)
            bundles = tuple(tuple(ordinals[k :: rules.parts]) for k in range(rules.parts))
            plan = Plan(one, rules.reads(one), 0, tuple(filter(None, bundles)), "").encoded()
            name = f"{schedule.PLAN}/{one}"
            assert store.put(name, plan) or store.get(name) == plan
            yield "planned"
        alive()
        for name in schedule.settled(store.names(), saved):
            store.remove(name)
            yield "tidying"
        # What one who was away puts of a settled step lies there until the next time, unused.
        until = step if rules.wrong == "forgets versions" else saved
        for version in store.numbers("policy"):
            if version < schedule.reads(until + 1, rules.lead):
                store.remove(f"policy/{version}")
        if step == LAST:
            store.replace(schedule.ENDED, "")
            return
        step += 1
        alive()
        plan = parsed(store.get(f"{schedule.PLAN}/{step}"))
        read = []
        for bundle in plan.each():
            while (said := store.get(f"{schedule.SPOOL}/{bundle.name}")) is None:
                yield "waiting"
                alive()
            read.extend(said)
        learnt(step, plan.ordinals, {turn[2] for turn in read if isinstance(turn, tuple)})
        weights, first = digest(weights, read), first + rules.draws
        yield "learnt"
        if step % rules.every == 0 or step == LAST:
            alive()
            for later in [one for one in store.numbers("save") if one > step]:
                store.remove(f"save/{later}")
            store.put(f"save/{step}", (weights, first))
            saved = step
            yield "saved"


def run(rules, chance=None, readers=1):
    """Runs to the end, disturbed by `chance`; returns (weights, kills by point)."""
    store, done = Store(), {}

    def learnt(step, ordinals, versions):
        assert done.setdefault(step, ordinals) == ordinals  # the same again after a kill
        assert (
            sorted(sum((done[s] for s in done if s < step), [])) + ordinals
            == [*range((step) * rules.draws)]
            or len(done) < step
        )
        ages = {step - 1 - version for version in versions}
        assert all(0 <= age <= rules.lead for age in ages), f"a turn is {max(ages)} versions old"

    def another(who):
        return trainer(store, rules, learnt) if who == "t" else reader(store, rules, who)

    kills = play(store, another, rules.lead, chance, readers)
    return store.get(f"save/{LAST}")[0], kills


def play(store, another, lead, chance, readers):
    """Lets programs go on, as `another` begins them, until the trainer ends; kills by point."""
    kills, running = {}, {who: another(who) for who in ("t", *(f"r{k}" for k in range(readers)))}
    frozen, rate = [], chance.choice([0.002, 0.02, 0.1]) if chance else 0
    pick = chance or random.Random(0)
    for move in range(20_000):
        planned = max(store.numbers(schedule.PLAN), default=0)  # nobody runs further ahead
        assert planned <= max(store.numbers("policy"), default=0) + 1 + lead
        who = pick.choice(sorted(running))
        try:
            where = next(running[who])
        except StopIteration:
            del running[who]
            if who == "t":
                return kills
            continue
        except Superseded:
            raise AssertionError("the living trainer is told that there is a later one") from None
        if pick.random() >= rate or where in ("waiting", "idle"):
            if frozen and pick.random() < 0.02:
                _thaw(frozen.pop(), store)
            continue
        kills[where] = kills.get(where, 0) + 1
        what = pick.random()
        if what < 0.25:  # a partition: it goes on later, beside its successor
            frozen.append(running[who])
            running[who] = another(who)
            next(running[who], None)  # it has begun when the other comes back
        elif who == "t" or what < 0.7 or len(running) == 2:
            running[who] = another(who)  # killed, and started again under its name
        else:
            del running[who]  # gone for good; somebody else joins
            running[f"n{move}"] = another(f"n{move}")
    raise AssertionError("no end")


def _thaw(zombie, store):
    """One who was away goes on for a while: nothing that is saved changes by that."""
    saves = {name: store.get(name) for name in store.names("save")}
    for _, _where in zip(range(20), _until_superseded(zombie), strict=False):
        pass
    assert {name: store.get(name) for name in store.names("save")} == saves


def _until_superseded(zombie):
    try:
        yield from zombie
    except Superseded:
        pass


def disturbed(seed, **changes):
    chance = random.Random(seed)
    rules = Rules(
        seed=seed, draws=chance.choice([1, 3, 5]), parts=chance.choice([1, 2, 3]),
        lead=chance.choice([0, 1, 2]), every=chance.choice([1, 2, 3]),
    )  # fmt: skip
    rules = dataclasses.replace(rules, **changes)
    return rules, chance, chance.randint(1, 4)


def check(seeds):
    kills = {}
    for seed in seeds:
        rules, chance, readers = disturbed(seed)
        alone, _ = run(rules)
        weights, hit = run(rules, chance, readers)
        assert weights == alone, f"schedule {seed}: {rules}"
        for where, count in hit.items():
            kills[where] = kills.get(where, 0) + count
    return kills


def test_the_last_weights_depend_on_no_kill_and_on_no_number_of_readers():
    kills = check(range(150))
    assert sum(kills.values()) > 500
    assert {"claimed", "turn", "kept", "before spool", "spooled"} <= kills.keys()
    assert {"published", "planned", "tidying", "learnt", "saved"} <= kills.keys()


@pytest.mark.slow
def test_of_a_thousand_schedules_none_ends_otherwise():
    """Two thousand with those of a live fleet (`test_schedule_live`)."""
    assert sum(check(range(150, 1150)).values()) > 5_000


@pytest.mark.parametrize(
    "wrong",
    ["newest", "older", "no second claims", "no fence", "forgets versions", "replaced"],
)
def test_a_rule_that_is_wrong_is_found(wrong):
    def fails(seed):
        rules, chance, readers = disturbed(seed, wrong=wrong, lead=1)
        try:
            return run(dataclasses.replace(rules, wrong=""))[0] != run(rules, chance, readers)[0]
        except (AssertionError, AttributeError, TypeError, ValueError):
            return True

    assert any(fails(seed) for seed in range(200))


# ---------------------------------------------------------------- the pure rule


def test_a_step_is_read_by_the_version_so_many_before_it():
    assert [schedule.reads(step, 0) for step in (1, 2, 3)] == [0, 1, 2]
    assert [schedule.reads(step, 1) for step in (1, 2, 3)] == [0, 0, 1]
    assert [schedule.reads(step, 2, since=4) for step in (5, 6, 7, 8)] == [4, 4, 4, 5]
    for lead in range(4):
        for done in range(8):
            for step in schedule.open_steps(done, lead, 9):
                assert 0 <= schedule.reads(step, lead) <= done < step <= min(done + 1 + lead, 9)


PLANS = [
    Plan(3, 2, 0, ((6, 8), (7,)), "t"),
    Plan(4, 2, 0, ((9, 11), (10,)), "t"),
]


def test_first_ones_own_then_what_nobody_began_then_what_fewest_did():
    def name(spooled=(), claims=None, me="a"):
        found = schedule.chosen(PLANS, spooled, claims or {}, me)
        return found and found.name

    assert name() == "3-0"
    assert name(claims={"3-0": ["b"]}) == "3-1"
    assert name(claims={"3-0": ["b"], "4-1": ["a"]}) == "4-1"
    assert name(claims={"3-0": ["a", "b"], "3-1": ["b"]}) == "4-0"  # another took it over
    every = {one.name: ["b"] for plan in PLANS for one in plan.each()}
    assert name(claims={**every, "3-0": ["b", "c"]}) == "3-1"
    assert name(spooled=["3-0", "3-1", "4-0"]) == "4-1"
    assert name(spooled=list(every)) is None


def test_a_plan_is_read_as_it_was_written_or_not_at_all():
    plan = PLANS[0]
    assert schedule.parsed(plan.encoded()) == plan
    assert plan.ordinals == [6, 7, 8]
    assert [*plan.each()] == [Bundle(3, 0, 2, 0, (6, 8)), Bundle(3, 1, 2, 0, (7,))]
    for cut in range(len(plan.encoded()) - 1):
        with pytest.raises(ValueError, match="is cut off, or was changed"):
            schedule.parsed(plan.encoded()[:cut])


def test_names_say_whose_they_are():
    names = ["claim/3-0-1", "claim/3-0-0", "claim/12-1-0", "spool/3-0", "terms", "policy/7/meta"]
    assert schedule.claimed(names) == {
        "3-0": ["claim/3-0-0", "claim/3-0-1"],
        "12-1": ["claim/12-1-0"],
    }
    assert [schedule.step_of(name) for name in names] == [3, 3, 12, 3, None, None]
    assert schedule.settled(names, 3) == ["claim/3-0-1", "claim/3-0-0", "spool/3-0"]
