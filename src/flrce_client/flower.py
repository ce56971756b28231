"""A Flower ClientApp in any framework, under a server of flrce: a stable name, encoded uploads and
downloads, costs and hold-out reports.

    from flwr.clientapp import ClientApp
    from flrce_client.flower import compressing, introduce

    app = introduce(ClientApp(mods=[compressing]))
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flrce_client.codecs import read_codec
from flrce_client.costs import measure_work
from flrce_client.downloads import ModelForm, decode_model, find_decoded_model, fingerprint_vector
from flrce_client.errors import CLIENT_MIGRATION, MalformedPayload
from flrce_client.layout import BATCHNORM_SUFFIXES, order_float_arrays
from flrce_client.power_supply import get_battery_metric
from flrce_client.streams import make_encoding_stream
from flrce_client.wire import (
    BASELESS_KEY,
    CLIENT_STATE_PREFIX,
    COMPRESSOR_KEY,
    DIGEST_KEY,
    DOWNLOAD_KEY,
    DOWNLOAD_RECORD,
    HELD_MODEL_PREFIX,
    HELLO_QUERY,
    KEY_PREFIX,
    LOST_KEY,
    NAMES_KEY,
    SAMPLES_KEY,
    TRAINED_KEY,
)

Arrays = dict[str, NDArray[Any]]
NextCall = Callable[[Message, Context], Message]
#: arrays of the model, context -> (the metric on the client's hold-out, its number of samples)
HoldoutMetric = Callable[[Arrays, Context], tuple[float, int]]
InitialModel = Callable[[Context], Arrays]  # arrays of the model that training starts from
HELD_MODELS = 2  # the newest, and the one before it, which the server may still refer to
HELD_ROUNDS = 3  # of a compressor's state: the server may die with two rounds not yet committed


def get_client_name(context: Context) -> str:
    """The node's stable name: client-id or partition-id of its --node-config, else its node id."""
    config = context.node_config
    return str(config.get("client-id", config.get("partition-id", f"node-{context.node_id}")))


def introduce(
    app: ClientApp,
    who: Callable[[Context], tuple[str, int]] | None = None,
    compresses: bool | None = None,
    parts: bool = False,
    differences: bool | None = None,
    initial: InitialModel | None = None,
) -> ClientApp:
    """Let an app tell its stable name, its samples (0: unknown) and its skills.

    Whether it `compresses` and decodes `differences` is what the app-wide mod below adds by itself;
    say so where the mod is on `train` alone. `initial` makes the model that training starts from,
    for example from a seed: where the server starts from the same floats, the device need not
    download them.
    """

    def answer_hello(message: Message, context: Context) -> Message:
        name, n = who(context) if who else (get_client_name(context), 0)
        entries: dict[str, Any] = {"client": name, "n": n, "parts": parts}
        skills = {"compresses": compresses, "differences": differences}
        entries |= {skill: value for skill, value in skills.items() if value is not None}
        if initial is not None:
            entries["initial"] = hold_initial_model(context, initial(context))
        hello = ConfigRecord({KEY_PREFIX + key: value for key, value in entries.items()})
        return Message(RecordDict({"hello": hello}), reply_to=message)

    if not isinstance(app, ClientApp):
        raise TypeError(f"introduce({type(app).__name__}): {CLIENT_MIGRATION}")
    try:
        app.query("flrce")(answer_hello)
    except ValueError as why:
        raise ValueError(CLIENT_MIGRATION) if "client_fn" in str(why) else why from None
    return app


def get_config(message: Message) -> Mapping[str, Any]:
    """A message's config, {} where it has none."""
    return next(iter(message.content.config_records.values()), ConfigRecord())


def get_model_arrays(message: Message) -> ArrayRecord:
    """The arrays of a message's model."""
    records = message.content.array_records
    if "arrays" in records:
        return records["arrays"]
    return next(record for name, record in records.items() if name != DOWNLOAD_RECORD)


@dataclass(frozen=True)
class EncodingMod:
    """A Flower mod: restores the model, lets the app train, and encodes its reply as its task says.

    With `holdout`, the model is judged before training where the server asks for it.
    """

    holdout: HoldoutMetric | None = None
    measure: Callable[[Callable[[], Message]], tuple[Message, Any]] = measure_work

    def __call__(self, message: Message, context: Context, call_next: NextCall) -> Message:
        if message.metadata.message_type == HELLO_QUERY:
            return declare_skills(call_next(message, context))
        if message.metadata.message_type != "train" or KEY_PREFIX + "t" not in get_config(message):
            return call_next(message, context)
        if not restore_model(message, context):
            return Message(write_lost_reply(get_config(message)), reply_to=message)
        return self._answer_task(message, context, call_next)

    def _answer_task(self, message: Message, context: Context, call_next: NextCall) -> Message:
        config, record = get_config(message), get_model_arrays(message)
        before = {name: array.numpy() for name, array in record.items()}
        held = self._judge_model(config, before, context)
        reply, cost = self.measure(lambda: call_next(message, context))
        records = [] if reply.has_error() else list(reply.content.array_records.values())
        if len(records) != 1 or len(reply.content.metric_records) != 1:
            return reply
        metrics = dict(next(iter(reply.content.metric_records.values())))
        metrics = {**get_battery_metric(), **metrics, "seconds": cost.seconds}
        metrics |= {} if cost.joules is None else {"joules": cost.joules}
        metrics.setdefault("train_loss", metrics.get("loss", 0.0))
        metrics.setdefault("loss-square", 0.0)
        after = {name: array.numpy() for name, array in records[0].items()}
        buffers = encode_update(config, context, before, after)
        echo = {KEY_PREFIX + key: config[KEY_PREFIX + key] for key in ("client", "t")}
        answer: dict[str, Any] = {
            "payload": ArrayRecord({name: Array(np.ascontiguousarray(x)) for name, x in buffers}),
            "metrics": MetricRecord(metrics),
            "reply": ConfigRecord({**echo, **name_base(before), **held}),
        }
        return Message(RecordDict(answer), reply_to=message)

    def _judge_model(
        self, config: Mapping[str, Any], arrays: Arrays, context: Context
    ) -> dict[str, Any]:
        if self.holdout is None or config.get(KEY_PREFIX + "judge") is not True:
            return {}
        value, n = self.holdout(dict(arrays), context)
        return {KEY_PREFIX + "held": float(value), KEY_PREFIX + "held-n": int(n)}


compressing = EncodingMod()


def declare_skills(hello: Message) -> Message:
    """An app's introduction, with what the mod adds to its skills."""
    records = {} if hello.has_error() else hello.content.config_records
    entries: Any = records.get("hello", {})
    if KEY_PREFIX + "client" in entries:
        for skill in ("compresses", "differences"):
            if KEY_PREFIX + skill not in entries:
                entries[KEY_PREFIX + skill] = True
    return hello


def make_form(arrays: Mapping[str, NDArray[Any]], names: list[str] | None = None) -> ModelForm:
    """How a model's arrays are concatenated, by the server's names or the usual order."""
    ordered = order_float_arrays(arrays) if names is None else names
    shapes = tuple(arrays[name].shape for name in ordered)
    trained = sum(
        int(arrays[name].size) for name in ordered if not name.endswith(BATCHNORM_SUFFIXES)
    )
    return ModelForm(tuple(ordered), shapes, trained)


def name_base(arrays: Arrays) -> dict[str, str]:
    """The hash of the model that was trained from, where it travelled unrounded."""
    form = make_form(arrays)
    if {arrays[name].dtype.name for name in form.names} != {"float32"}:
        return {}
    return {KEY_PREFIX + "base": fingerprint_vector(form.pack(arrays))}


def encode_update(
    config: Mapping[str, Any], context: Context, before: Arrays, after: Arrays
) -> list[tuple[str, NDArray[Any]]]:
    """The buffers of (after - before), and the compressor's state kept for later rounds."""
    form = make_form(before)
    if set(after) != set(before) or any(after[n].shape != before[n].shape for n in form.names):
        raise ValueError("the reply's arrays have other names or shapes than the model's")
    wide = any(before[name].dtype == np.float64 for name in form.names)
    kind = np.float64 if wide else np.float32
    u = form.pack(after, kind) - form.pack(before, kind)
    code = read_codec(config, COMPRESSOR_KEY)
    seed, t, client = (config[KEY_PREFIX + key] for key in ("seed", "t", "client"))
    rng = make_encoding_stream(seed, t, client)
    buffers, client_state = code.encode(u, form.layout, rng, load_client_state(context, t))
    save_client_state(context, t, client_state)
    return list(buffers.items())


def restore_model(message: Message, context: Context) -> bool:
    """Put the whole model into a message that brings an encoded one, and hold it where the server
    says so; False: the device does not hold what the difference refers to.
    """
    config, records = get_config(message), message.content.array_records
    if DOWNLOAD_KEY not in config:
        if NAMES_KEY in config:
            hold_model(context, get_model_arrays(message), config)
        return True
    buffers = {name: array.numpy() for name, array in records[DOWNLOAD_RECORD].items()}
    restored = decode_download(config, buffers, context)
    if restored is None:
        return False
    message.content["arrays"] = restored
    del message.content[DOWNLOAD_RECORD]
    return True


def decode_download(
    config: Mapping[str, Any], buffers: Arrays, context: Context
) -> ArrayRecord | None:
    """The model of an encoded download, held from now on; None: its base is not held here."""
    held = list_held_models(context)
    if not held:
        return None
    names, trained = list(held[0][1][NAMES_KEY]), int(held[0][1][TRAINED_KEY])
    newest = {name: array.numpy() for name, array in held[0][0].items()}
    form = ModelForm(tuple(names), tuple(newest[name].shape for name in names), trained)
    code = read_codec(config, DOWNLOAD_KEY)
    seed, t, client = (config[KEY_PREFIX + key] for key in ("seed", "t", "client"))
    vectors = [form.pack({n: a.numpy() for n, a in record.items()}) for record, _ in held]
    if config.get(BASELESS_KEY) is True:
        vectors, client = [np.zeros_like(vectors[0])], ""
    model = find_decoded_model(buffers, vectors, code, form, (seed, t, client), config[DIGEST_KEY])
    if model is None:
        return None
    values = form.unpack(model)
    restored = ArrayRecord({name: Array(values.get(name, kept)) for name, kept in newest.items()})
    hold_model(context, restored, held[0][1])
    return restored


def list_held_models(context: Context) -> list[tuple[ArrayRecord, Mapping[str, Any]]]:
    """(model, how it is concatenated), the newest first."""
    state = context.state
    numbers = sorted(
        (
            int(key.removeprefix(HELD_MODEL_PREFIX))
            for key in state.array_records
            if key.startswith(HELD_MODEL_PREFIX)
        ),
        reverse=True,
    )
    form = state.config_records.get(HELD_MODEL_PREFIX + "form")
    if form is None:
        return []
    return [(state.array_records[f"{HELD_MODEL_PREFIX}{n}"], form) for n in numbers]


def hold_model(context: Context, arrays: ArrayRecord, config: Mapping[str, Any]) -> None:
    """Keep a model, and of the older ones as many as the server may still refer to."""
    state, prefix = context.state, HELD_MODEL_PREFIX
    form: dict[str, Any] = {
        NAMES_KEY: list(config[NAMES_KEY]),
        TRAINED_KEY: int(config[TRAINED_KEY]),
    }
    numbers = sorted(
        int(key.removeprefix(prefix)) for key in state.array_records if key.startswith(prefix)
    )
    known = state.config_records.get(prefix + "form")
    if known is not None and dict(known) != form:  # another network
        for number in numbers:
            del state[f"{prefix}{number}"]
        numbers = []
    state[prefix + "form"] = ConfigRecord(form)
    state[f"{prefix}{numbers[-1] + 1 if numbers else 0}"] = arrays
    for number in numbers[: len(numbers) + 1 - HELD_MODELS]:
        del state[f"{prefix}{number}"]


def hold_initial_model(context: Context, arrays: Arrays) -> str:
    """The hash of the initial model, which is held where no newer model is; "" where its floats
    would be rounded.
    """
    form = make_form(arrays)
    if {arrays[name].dtype.name for name in form.names} != {"float32"}:
        return ""
    if not list_held_models(context):
        record = ArrayRecord({name: Array(np.ascontiguousarray(x)) for name, x in arrays.items()})
        hold_model(context, record, {NAMES_KEY: form.names, TRAINED_KEY: form.trained})
    return fingerprint_vector(form.pack(arrays))


def write_lost_reply(config: Mapping[str, Any]) -> RecordDict:
    """The reply of a device that cannot decode its model."""
    echo = {KEY_PREFIX + key: config[KEY_PREFIX + key] for key in ("client", "t")}
    reply = ConfigRecord({**echo, LOST_KEY: True})
    return RecordDict({"reply": reply, "metrics": MetricRecord({SAMPLES_KEY: 0})})


def load_client_state(context: Context, t: int | None = None) -> Arrays:
    """What this client kept before round t, or last: a round that is run again starts from the
    same.
    """
    rounds = list_state_rounds(context)
    before = [r for r in rounds if t is None or r < t]
    if not before:
        return {}
    kept = context.state.array_records[f"{CLIENT_STATE_PREFIX}{max(before)}"]
    return {name: array.numpy() for name, array in kept.items()}


def save_client_state(context: Context, t: int, client_state: Mapping[str, NDArray[Any]]) -> None:
    """Keep a compressor's state of round t, and that of the rounds before as long as needed."""
    if not client_state:
        return
    record = ArrayRecord({name: Array(np.ascontiguousarray(x)) for name, x in client_state.items()})
    context.state[f"{CLIENT_STATE_PREFIX}{t}"] = record
    for old in sorted(list_state_rounds(context), reverse=True)[HELD_ROUNDS:]:
        del context.state[f"{CLIENT_STATE_PREFIX}{old}"]


def list_state_rounds(context: Context) -> list[int]:
    """Rounds whose state this client has."""
    keys = [key for key in context.state.array_records if key.startswith(CLIENT_STATE_PREFIX)]
    return [int(key.removeprefix(CLIENT_STATE_PREFIX)) for key in keys]


__all__ = ["EncodingMod", "MalformedPayload", "compressing", "decode_model", "introduce"]
