"""The tasks of the examples: their models, what they ask, how they are judged, and what BatchNorm keeps."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import exdyna_jax
import train
from presets import LANGUAGE, RECOMMENDATION, VISION
from workloads import TASKS, Pace, Task, check_choice, cifar, count, language, load_task, ranking, recommend, text
from workloads.lstm import LSTM
from workloads.neumf import NeuMF
from workloads.normalised import normalised
from workloads.transformer import Transformer

KEY = jax.eval_shape(lambda: jax.random.key(0))


def size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


IMAGES = {"image": np.zeros((2, 32, 32, 3), np.uint8), "label": np.zeros(2, np.int32)}


@pytest.mark.parametrize(
    ("model", "parameters", "statistics"),
    [
        # as the authors' code counts them, less the biases of convolutions that BatchNorm follows, where it has some
        ("resnet18", 11_173_962, 9_600),
        ("senet18", 11_260_354, 6_912),
        ("googlenet", 6_166_250 - 7_904, 15_808),
        ("vgg16", 14_728_266 - 4_224, 8_448),
        ("vgg19", 20_040_522 - 5_504, 11_008),
    ],
)
def test_networks_for_images(model: str, parameters: int, statistics: int) -> None:
    """Of the published size, and fit to be trained and judged. Nothing is computed."""
    task = cifar.image_task(IMAGES, IMAGES, cifar.MODELS[model](10))
    params, stats = jax.eval_shape(task.init, KEY)
    assert (size(params), size(stats)) == (parameters, statistics)
    loss, (after, means) = jax.eval_shape(task.loss, params, stats, IMAGES, KEY)
    assert (loss.shape, set(means)) == ((), {"accuracy"})
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, stats)
    assert {name: score.shape for name, score in jax.eval_shape(task.score, params, stats, IMAGES).items()} == {
        "loss": (2,),
        "accuracy": (2,),
    }


def test_a_hundred_classes() -> None:
    task = cifar.image_task(IMAGES, IMAGES, cifar.MODELS["resnet18"](100))
    assert size(jax.eval_shape(task.init, KEY)[0]) == 11_220_132


def test_networks_for_language_and_recommendation() -> None:
    """As the authors' code counts them; flax has one bias for each gate, where PyTorch has two."""
    tokens = jax.ShapeDtypeStruct((1, 30), jnp.int32)
    tied = jax.eval_shape(lambda key, tokens: LSTM(34_069, 650).init(key, tokens, train=False), KEY, tokens)
    assert size(tied) == 28_949_319 - 2 * 4 * 650
    untied = jax.eval_shape(lambda key, tokens: LSTM(34_069, 650, tied=False).init(key, tokens, train=False), KEY, tokens)
    assert size(untied) == size(tied) + 650 * 34_069
    pair = jax.ShapeDtypeStruct((1,), jnp.int32)
    neumf = jax.eval_shape(lambda key, user, item: NeuMF(138_493, 26_744).init(key, user, item, train=False), KEY, pair, pair)
    assert size(neumf) == 31_832_577


@pytest.mark.parametrize(
    "network", [LSTM(20, 8), LSTM(20, 8, tied=False), Transformer(20, 8, heads=2)], ids=["tied", "untied", "transformer"]
)
def test_a_language_model_sees_only_what_comes_before(network: nn.Module) -> None:
    tokens = jnp.arange(6)[None]
    logits = jax.jit(lambda key, x: network.apply(network.init(key, tokens, train=False), x, train=False))
    before, after = (logits(jax.random.key(0), x) for x in (tokens, tokens.at[0, 4].set(19)))
    np.testing.assert_allclose(before[0, :4], after[0, :4], rtol=0, atol=1e-6)
    assert not np.allclose(before[0, 4:], after[0, 4:], atol=1e-4)


def test_windows_ask_for_each_token_once() -> None:
    samples = language.windows(np.arange(100, 123), 5)["tokens"]
    assert samples[:, 0].tolist() == [100, 105, 110, 115]
    assert samples[:, 1:].ravel().tolist() == list(range(101, 121))


def test_perplexity() -> None:
    assert language.perplexity({"loss": math.log(7), "accuracy": 0.5}) == {"perplexity": pytest.approx(7), "accuracy": 0.5}
    assert language.perplexity({"loss": 1e6, "accuracy": 0.0})["perplexity"] == math.inf


def test_text_at_hand() -> None:
    """Plain English, no paragraph twice, and little that is held out was trained on."""
    content = text.read().tobytes().decode()
    assert len(content) > 300_000
    paragraphs = content.split("\n\n")
    assert len(set(paragraphs)) > 0.99 * len(paragraphs)
    task = load_task("text")
    assert 0.08 < count(task.test) / (count(task.test) + count(task.train)) < 0.12
    trained_on = task.train["tokens"][:, :-1].tobytes()
    held_out = task.test["tokens"][:, :-1]  # neighbouring rows are neighbouring text
    pieces = held_out[: len(held_out) // 2 * 2].reshape(-1, 32)  # long enough not to be a mere phrase
    assert np.mean([piece.tobytes() in trained_on for piece in pieces]) < 0.1  # with all paragraphs it would be a third


def test_feedback_at_hand() -> None:
    pairs, topics, words = recommend.read()
    assert topics > 70
    assert (np.bincount(pairs[:, 1], minlength=words) >= 3).all()
    task = load_task("recommend")
    taken = set(zip(task.train["user"].tolist(), task.train["item"].tolist(), strict=True))
    assert len(taken) == count(task.train)
    assert not taken & set(zip(task.test["user"].tolist(), task.test["items"][:, 0].tolist(), strict=True))
    assert 1000 < count(task.test) == len(pairs) - len(taken)


class Given(nn.Module):
    """Likes items by their number, whoever asks."""

    likes: tuple[float, ...]

    @nn.compact
    def __call__(self, users: jax.Array, items: jax.Array, train: bool) -> jax.Array:
        return self.param("scale", nn.initializers.ones, ()) * jnp.array(self.likes)[items]


@pytest.mark.parametrize(
    ("ahead", "hit", "gain"), [(0, 1, 1.0), (1, 1, 1 / math.log2(3)), (9, 1, 1 / math.log2(11)), (10, 0, 0.0), (99, 0, 0.0)]
)
def test_rank(ahead: int, hit: int, gain: float) -> None:
    """So many of the 99 are liked better than the one that was held out, item 0."""
    task = ranking.ranking_task(np.array([[1, 100]]), np.array([[0, 0]]), 101, Given((0.5, *[1.0] * ahead, *[0.1] * (100 - ahead))), 1, {})
    batch = {"user": np.array([0]), "items": np.arange(100)[None]}
    scores = task.score({"scale": jnp.float32(1)}, {}, batch)
    assert (float(scores["accuracy"][0]), float(scores["ndcg"][0])) == (hit, pytest.approx(gain))
    assert task.measures({"accuracy": 0.5, "ndcg": 0.25}) == {"HR@10": 0.5, "NDCG@10": 0.25}
    indifferent, broken = (task.score({"scale": jnp.float32(scale)}, {}, batch) for scale in (0, jnp.nan))
    assert float(indifferent["accuracy"][0]) == float(broken["accuracy"][0]) == 0
    assert float(indifferent["loss"][0]) == pytest.approx(math.log(2))


class Small(nn.Module):
    """The smallest network with BatchNorm."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        logits: jax.Array = nn.Dense(10)(normalised(images, 4, 3, train, stride=8).mean(axis=(1, 2)))
        return logits


def small_task() -> Task:
    rng = np.random.default_rng(0)
    columns = {"image": rng.integers(0, 256, (8, 32, 32, 3)).astype(np.uint8), "label": np.arange(8, dtype=np.int32)}
    return cifar.image_task(columns, columns, Small())


def test_batch_norm_is_averaged_over_the_workers() -> None:
    """After a step the running averages are the mean of what each worker would have alone; a NaN leaves them finite."""
    task = small_task()
    settings = train.Settings(method="dense", workers=2, batch=4)
    mesh, key = train.make_mesh(2), jax.random.key(1)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules ask for it
        create = partial(train._create, task, train.make_optimizer(settings, train.course_of(replace(settings, steps=5), task)))
        shapes = train.lay_out(jax.eval_shape(create, KEY), mesh)
        state = jax.jit(create, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))(key)
        before = jax.device_get((state.params, state.statistics))
        mapped = train.by_shard_map(task, shapes, key, task.train, settings)
        state, told = mapped.step(state, task.train)
        exdyna_jax.assert_replicas_equal((state.params, state.statistics))
        middle = jax.device_get((state.params, state.statistics))

        alone = []
        for worker in range(2):
            rows = {name: column[4 * worker : 4 * worker + 4] for name, column in task.train.items()}
            mine = jax.random.fold_in(jax.random.fold_in(key, 0), worker)
            alone.append(jax.jit(task.loss)(*before, rows, mine)[1][0])
        jax.tree.map(lambda got, a, b: np.testing.assert_allclose(got, (a + b) / 2, rtol=1e-5, atol=1e-6), middle[1], *alone)
        assert not np.allclose(alone[0]["BatchNorm_0"]["mean"], alone[1]["BatchNorm_0"]["mean"])
        assert told["bytes_dense"] == 4 * size(before)  # what a ring of two sends to average gradient and statistics

        state = state.replace(params=jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan), state.params))
        state, told = mapped.step(state, task.train)
        assert told["skipped_in_a_row"] == 1
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.statistics)))


def test_evaluation_uses_the_running_averages() -> None:
    task = small_task()
    params, statistics = jax.jit(task.init)(jax.random.key(0))
    moved = jax.tree.map(lambda leaf: leaf + 1, statistics)
    score = jax.jit(task.score)
    whole, part = (score(params, statistics, {name: column[:n] for name, column in task.test.items()})["loss"] for n in (8, 2))
    np.testing.assert_allclose(whole[:2], part, rtol=1e-5)
    assert not np.allclose(score(params, moved, task.test)["loss"], whole)


RUNS = {
    "text": ({"density": 0.05}, ["perplexity", "accuracy"]),
    "recommend": ({"method": "dense"}, ["HR@10", "NDCG@10"]),
}


@pytest.mark.parametrize("task", RUNS)
def test_a_run(task: str) -> None:
    """A few steps, in which the types of what goes round in the LSTM's loop must fit."""
    given, measures = RUNS[task]
    with jax.numpy_dtype_promotion("standard"):
        result = train.train(train.Settings(task=task, workers=2, batch=2, steps=3, **given))
    assert list(result.quality) == measures
    assert len(result.history["loss"]) == 3
    assert result.quality[measures[0]] == pytest.approx(math.exp(result.loss) if task == "text" else result.accuracy)
    if task == "text":
        assert 0 < result.loss < math.log(256) + 0.1, "no worse than the model that knows nothing of bytes"
        assert 0 < result.bytes_sent < result.bytes_dense / 4


CHOICES: list[tuple[tuple[str, str | None, str | None], str]] = [
    (("tea", None, None), "task='tea' is not one of digits, text, recommend, cifar10, cifar100, wikitext2, movielens"),
    (("cifar10", None, None), "task='cifar10' needs --data DIR, a directory with the python version of CIFAR-10"),
    (("digits", "here", None), "task='digits': data='here' does not go with it: its data is at hand"),
    (("digits", None, "vgg16"), "task='digits': model='vgg16' is not one of cnn, mlp"),
    (("recommend", None, "vgg16"), "task='recommend': model='vgg16' does not go with it: it has a model of its own"),
    (("text", None, "gpt"), "task='text': model='gpt' is not one of lstm, lstm_untied, transformer"),
]


@pytest.mark.parametrize(("choice", "message"), CHOICES)
def test_bad_choice(choice: tuple[str, str | None, str | None], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_choice(*choice)


def test_all_models_are_there() -> None:
    assert TASKS["cifar10"].models == TASKS["cifar100"].models == tuple(cifar.MODELS)
    assert TASKS["text"].models == TASKS["wikitext2"].models == tuple(text.MODELS)


def published_rate(epoch: float, workers: int, base: float, reference: int, drops: list[int]) -> float:
    """The authors' rule: it rises by epochs to `base` times a factor, and falls to a tenth at each drop."""
    factor = 32 / reference * workers
    rate = base * (1 + (factor - 1) * min(epoch / 5, 1))
    return rate / 10 ** sum(epoch >= drop for drop in drops)


@pytest.mark.parametrize(("recipe", "arguments"), [(VISION, (0.1, 128, [150])), (LANGUAGE, (2.5, 64, [60, 80]))])
def test_learning_rates_of_the_papers(recipe: Any, arguments: tuple[float, int, list[int]]) -> None:
    workers, steps = 8, 13  # of an epoch
    peak = recipe.peak(32 * workers)
    schedule = recipe.schedule(peak, steps)
    places = np.array([0, 1, 30, 64, 65, 66, *(steps * np.array([59, 60, 80, 149, 150, 199]))], np.int32)
    want = [published_rate(place / steps, workers, *arguments) for place in places]
    np.testing.assert_allclose(jax.jit(schedule)(places), want, rtol=1e-5)


def test_optimizers_of_the_papers() -> None:
    rate = RECOMMENDATION.schedule(RECOMMENDATION.peak(1), 7)
    assert float(rate(0)) == float(rate(10_000)) == pytest.approx(0.0045)
    params = {"Conv_0": jnp.ones(3), "BatchNorm_0": {"scale": jnp.ones(3)}}
    tx = VISION.optimizer(lambda step: 1.0)
    update, _ = jax.jit(lambda params: tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params))(params)
    np.testing.assert_allclose(update["Conv_0"], -1.9e-4, rtol=1e-5)  # decay, and Nesterov's step of it
    assert not np.any(update["BatchNorm_0"]["scale"])


def test_a_gradient_is_clipped_before_the_exchange() -> None:
    settings = train.Settings(method="dense", task="wikitext2", data="nowhere", workers=2, preset="paper")
    tx = train.make_optimizer(settings, train.Course(1, 1.0, lambda step: 1.0, 0.9))

    def update(gradient: jax.Array) -> Any:
        return tx.update({"w": gradient}, tx.init({"w": gradient}))[0]["w"]

    gradients = jnp.array([[30.0, 40.0], [0.0, 0.1]])
    got = jax.jit(jax.vmap(update, axis_name=train.AXIS))(gradients)
    np.testing.assert_allclose(got[0], -(np.array([0.24, 0.32]) + np.array([0, 0.1])) / 2, rtol=1e-5)


def test_momentum_is_the_tasks_own_unless_asked_for() -> None:
    task = small_task()._replace(paces={"sgd": Pace(0.3, momentum=0.25), "adamw": Pace(0.02)})
    courses = [train.course_of(train.Settings(optimizer=optimizer), task) for optimizer in task.paces]
    assert [(course.peak, course.momentum) for course in courses] == [(0.3, 0.25), (0.02, 0.9)]
    assert train.course_of(train.Settings(momentum=0.0), task).momentum == 0  # which is not None
    assert load_task("text").paces["sgd"].momentum == train.recipe_of("paper", "wikitext2").settings["momentum"] == 0


def test_preset_and_flags() -> None:
    asked = {"task": "cifar10", "data": "nowhere", "preset": "paper"}
    settings = train.settings_of(asked)
    assert (settings.batch, settings.density, settings.optimizer, settings.momentum) == (32, 0.001, "sgd", 0.9)
    assert train.settings_of({**asked, "density": 0.01, "batch": 64}) == replace(settings, density=0.01, batch=64)
    assert train.settings_of({"density": 0.5}) == train.Settings(density=0.5)
    course = train.course_of(settings, small_task()._replace(train={"label": np.zeros(50_000)}))
    assert (course.steps, course.peak, course.momentum) == (200 * (50_000 // 256), pytest.approx(0.2), 0.9)
    for flag in ("optimizer", "learning_rate", "momentum"):
        with pytest.raises(ValueError, match=f"{flag}=1 does not go with preset='paper', which has its own"):
            train.settings_of({**asked, flag: 1})
    with pytest.raises(
        ValueError, match="preset='paper' has no settings for task='digits', only for cifar10, cifar100, wikitext2, movielens"
    ):
        train.settings_of({"preset": "paper"})
    with pytest.raises(ValueError, match="preset='fast' is not one of paper"):
        train.Settings(preset="fast")
