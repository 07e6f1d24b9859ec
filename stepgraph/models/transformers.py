"""`CausalLM`: a causal language model of transformers, unmodified, with the calls of the models here; and which tensors
of a checkpoint each of its parameters is made of.

Its configuration is the folder of its checkpoint, which a run reads again when it is resumed or sampled.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stepgraph.errors import first_line
from stepgraph.models.family import Family, HuggingFace, Piece, num_params, whole_piece
from stepgraph.models.hf_decoder import CONFIG, read_json, write_json

ADAPTER = "adapter"  # in the export of a run with LoRA


@dataclasses.dataclass(frozen=True)
class CausalLMConfig:
    """``folder``: has the ``config.json`` and the weights of a model that transformers knows."""

    folder: str = ""

    _text = property(lambda self: _config(self.folder).get_text_config())
    vocab_size = property(lambda self: self._text.vocab_size)
    dim = property(lambda self: self._text.hidden_size)
    n_layers = property(lambda self: self._text.num_hidden_layers)
    score_flops = property(lambda self: 2 * self.dim)
    #: The longest sequence that the model was made for.
    longest = property(lambda self: getattr(self._text, "max_position_embeddings", None))

    def num_params(self, *, lookup_table: bool = True, active: bool = False) -> int:
        """Number of parameters. Without ``lookup_table``: only the ones a token is multiplied by (active experts)."""
        whole, table, experts = _counts(self.folder)
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        of = next(filter(None, (getattr(self._text, name, None) for name in names)), 1)
        idle = experts * (of - getattr(self._text, "num_experts_per_tok", of)) // of
        return whole if lookup_table else whole - table - idle


def read_config(folder: Path) -> CausalLMConfig:
    """The configuration of the model in ``folder``. ``ValueError``, one line, if transformers cannot train it."""
    _config(str(folder))
    return CausalLMConfig(str(folder))


def lora_options(text: str) -> dict[str, Any]:
    """``r=16,alpha=32,targets=all-linear+experts,dora`` as options of ``peft.LoraConfig``. ``ValueError``, one line,
    for others. ``experts``, in ``target_parameters``: the weights of all experts, which `CausalLM` names."""
    kinds = {"r": int, "alpha": float, "targets": str, "dropout": float}
    parts = text.split(",")
    forms = {f"use_{word}": True for word in ("dora", "rslora") if word in parts}
    try:
        pairs = (part.partition("=") for part in parts if f"use_{part}" not in forms)
        given = {key: kinds[key](value) for key, _, value in pairs}
        rank, targets = given.get("r", 16), given.get("targets", "all-linear")
        if rank < 1 or not 0 <= given.get("dropout", 0) < 1:
            raise ValueError("out of range")
    except (KeyError, ValueError) as error:
        form = "r=16,alpha=32,targets=q_proj+v_proj,dropout=0.1"
        raise ValueError(f"lora={text} is not allowed: write it as {form}; dora, rslora may follow") from error
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"lora={text} needs peft: pip install peft")
    names = targets.split("+")
    experts = {"target_parameters": ["experts"]} if "experts" in names else {}
    modules = [name for name in names if name != "experts"]
    modules = "all-linear" if modules == ["all-linear"] else modules
    rest = experts | {"lora_alpha": given.get("alpha", 2 * rank), "lora_dropout": given.get("dropout", 0.0)}
    return {"r": rank, "target_modules": modules} | rest | forms


class CausalLM(nn.Module):
    """A model of transformers: tokens (B, T) int64 -> logits (B, T, V).

    ``weights``: whether to read the weights in the folder, in ``dtype``; otherwise transformers draws them. ``lora``:
    options of ``peft.LoraConfig``; the weights are then read and frozen. ``quantize``: with LoRA, quantizes weights of
    a model on the CPU, experts only after the adapter was added; returns what has ``dequantize(dtype)`` by parameter
    name, and one line about weights left unquantized. ``shapes``: of the tensors in the folder. If given, weights that
    can be read in parts are not read here: ``pieces`` lists them by the names of ``inner``.
    """

    def __init__(
        self,
        config: CausalLMConfig,
        dtype: torch.dtype = torch.float32,
        weights: bool = False,
        lora: Any = None,
        quantize: Callable[[nn.Module, bool], tuple[Mapping[str, Any], str]] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ):
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.config, self.lora = config, lora is not None
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
        found = "" if shapes is None else self._in_parts(shapes, options)
        self.pieces, self.whole_because = (found, "") if isinstance(found, dict) else ({}, found)
        if self.pieces:
            pass
        elif weights or self.lora:
            options |= {"output_loading_info": True, "local_files_only": True, "ignore_mismatched_sizes": True}
            with torch.device("cpu") if quantize else contextlib.nullcontext(), _explained(config.folder):
                self.inner, info = AutoModelForCausalLM.from_pretrained(config.folder, **options)
            for name, there, here in sorted(info["mismatched_keys"]):
                raise ValueError(
                    f"{config.folder}: {name} has shape {tuple(there)}, and config.json asks for {tuple(here)}: use a "
                    "checkpoint of this configuration"
                )
            if missing := sorted(info["missing_keys"]):
                raise ValueError(f"{config.folder} lacks {', '.join(missing[:3])}: use a complete checkpoint")
        else:
            found = _config(config.folder)
            with _explained(config.folder):
                self.inner = AutoModelForCausalLM.from_config(found, **options)
        self.quantized = {} if quantize is None else dict(quantize(self.inner, False)[0])
        if lora is not None:
            import peft

            # The adapter has the dtype of the weights, like all parameters of a run.
            experts = {"target_parameters": _experts(self.inner)} if "target_parameters" in lora else {}
            adapter = peft.LoraConfig(task_type="CAUSAL_LM", **lora | experts)
            try:
                with torch.device("cpu"):  # a seed draws the same adapter on every device
                    self.inner = peft.get_peft_model(self.inner, adapter, autocast_adapter_dtype=False)
            except ValueError as error:  # of modules that the model does not have
                raise ValueError(f"lora: {first_line(error)}") from error
            for param in (p for p in self.inner.parameters() if p.requires_grad):
                param.data = param.data.to(dtype)  # peft's own choice next to a quantized weight is fp32
        self.unquantized = ""
        if quantize is not None:
            experts, self.unquantized = quantize(self.inner.get_base_model(), True)
            self.quantized |= {path.replace(".base_layer", ""): weight for path, weight in experts.items()}
        self.inner.train()

    def _in_parts(
        self, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]
    ) -> dict[str, list[Piece]] | str:
        """Build the model without its weights, and say what makes them; or why it has to be read whole."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"), _explained(self.config.folder):
            skeleton = AutoModelForCausalLM.from_config(_config(self.config.folder), **options)
            found = pieces_of(skeleton, shapes)
        if isinstance(found, dict):
            with _explained(self.config.folder):
                self.inner = without_weights(skeleton, self.config.folder, options)
        return found

    def pieces_by_name(self) -> dict[str, list[Piece]]:
        """``pieces`` by the names of parameters and buffers, under an adapter too."""
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        plain = {
            n: n.removeprefix("inner.").removeprefix("base_model.model.").replace(".base_layer", "") for n in names
        }
        return {name: self.pieces[known] for name, known in plain.items() if known in self.pieces}

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """With ``positions`` (B, T), that begin again at 0 in each document, documents do not see each other."""
        places = {} if positions is None else {"position_ids": positions}
        return self.inner(input_ids=tokens, use_cache=False, **places).logits

    def without_adapter(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a model with LoRA is what it was before."""
        return self.inner.disable_adapter()

    def check_documents(self) -> None:
        """Raise ``ValueError``, one line, if a document of a row sees another one."""
        device = next(self.parameters()).device
        positions = torch.cat([torch.arange(9), torch.arange(7)])[None].to(device)
        tokens = (torch.arange(1, 17, device=device) % self.config.vocab_size)[None]  # 0 may be padding: zeros
        if crosses_documents(self.inner, lambda: self(tokens, positions), 9):
            raise ValueError(
                f"in {type(self.inner).__name__} a document of a row sees the earlier ones, as in state-space layers "
                "or convolutions over the sequence: use --document-mask off"
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As ``nn.Module``'s; of a model with LoRA only what is trained."""
        trained = {name for name, param in self.named_parameters() if param.requires_grad}
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if name in trained} if self.lora else state

    def round_frozen(self, dtype: torch.dtype) -> None:
        """Cast the frozen weights of linear layers to ``dtype``, as autocast else does in every step. The ones that an
        embedding shares stay."""
        tables = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        linear = (m for m in self.modules() if isinstance(m, nn.Linear) and id(m.weight) not in tables)
        for param in (
            p for m in linear for p in m.parameters(recurse=False) if not p.requires_grad and p.is_floating_point()
        ):
            param.data = cast(param.data, dtype)

    def init_weights(self, seed: int | None = None, parts: Mapping[str, Any] | None = None) -> None:
        """Nothing is left to do: transformers has drawn or read the weights."""

    @torch.no_grad()
    def generate(self, prompt: list[int], n: int, choose: Any, stop: Collection[int]) -> list[int]:
        """Up to ``n`` tokens behind ``prompt``, by transformers' ``generate``; each is what ``choose`` makes of its
        logits (V,). Ends before one of ``stop``."""
        from transformers import GenerationConfig, LogitsProcessor

        class Chosen(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                token = torch.tensor(choose(scores[0].float().cpu()), device=scores.device)
                return torch.full_like(scores, -torch.inf).index_fill_(1, token, 0)

        given = torch.tensor([prompt], device=next(self.parameters()).device)
        ends = {"eos_token_id": sorted(stop) or None, "pad_token_id": 0}
        settings = GenerationConfig(max_new_tokens=n, do_sample=False, use_cache=True, **ends)
        options = {"attention_mask": torch.ones_like(given), "generation_config": settings}
        made = self.inner.generate(input_ids=given, logits_processor=[Chosen()], **options)[0, len(prompt) :].tolist()
        return made[:-1] if made and made[-1] in stop else made

    def read_base(self) -> nn.Module:
        """The model of transformers in the folder, on the CPU: what an adapter is merged into."""
        from transformers import AutoModelForCausalLM

        with torch.device("cpu"):
            return AutoModelForCausalLM.from_pretrained(self.config.folder, dtype="auto", local_files_only=True)

    def dequantized(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The name in `read_base` and the values, fp32, of each quantized weight. All ranks of a mesh call."""
        for name, weight in self.quantized.items():
            yield name, weight.dequantize(torch.float32)

    def save(
        self, folder: Path, tokens: Mapping[str, int | None], state: dict[str, torch.Tensor], base: nn.Module | None
    ) -> None:
        """Write a checkpoint that ``AutoModelForCausalLM.from_pretrained`` reads; of a model with LoRA the adapter
        merged into ``base``, and the adapter, which ``peft`` reads, in the folder `ADAPTER` in it. ``state``: the whole
        tensors of `state_dict`. ``tokens``: ids for its ``config.json``."""
        generation = folder / "generation_config.json"
        before = generation.read_text() if generation.exists() else None
        state = {name.removeprefix("inner."): value for name, value in state.items()}
        if base is not None:
            import peft

            self.inner.save_pretrained(folder / ADAPTER, state_dict=state)
            adapted = peft.PeftModel.from_pretrained(base, folder / ADAPTER)
            _untie(adapted.get_base_model())
            adapted.merge_and_unload().save_pretrained(folder)
        else:
            self.inner.save_pretrained(folder, state_dict=state)
        write_json(folder / CONFIG, read_json(folder / CONFIG) | dict(tokens))
        if before is not None:
            generation.write_text(before)


def _untie(model: nn.Module) -> None:
    """Give the head of ``model`` its own weight if an adapter is on one of two tied tables, or it would change both."""
    tables = model.get_input_embeddings(), model.get_output_embeddings()
    lookup, head = (getattr(table, "base_layer", table) for table in tables)
    if tables != (lookup, head) and head is not None and head.weight is lookup.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _experts(model: nn.Module) -> list[str]:
    """The weights of all experts of a layer in one parameter, by the end of their names that layers share."""
    named = [name.split(".") for name, param in model.named_parameters() if ".experts." in name and param.ndim == 3]
    if not named:
        raise ValueError(f"lora: targets name experts, and {type(model).__name__} has none in one parameter: drop them")
    return list(dict.fromkeys(".".join(parts[-3:]) for parts in named))


@functools.lru_cache(maxsize=8)
def _config(folder: str) -> Any:
    raw = read_json(Path(folder) / CONFIG)
    kind, quantized = raw.get("model_type"), (raw.get("quantization_config") or {}).get("quant_method")
    try:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known
    except ImportError as error:
        raise ValueError(f"{folder}: {kind!r} is a model of transformers: pip install 'stepgraph[hf]'") from error
    if kind not in known:
        raise ValueError(f"{folder}: transformers has no causal language model of type {kind!r}; use one that it has")
    if quantized:
        raise ValueError(f"{folder} is quantized ({quantized}): use the checkpoint in bf16 or fp32")
    with _explained(folder):
        return AutoConfig.from_pretrained(folder, local_files_only=True)


@contextlib.contextmanager
def _explained(folder: str) -> Iterator[None]:
    """Raise what transformers raises for the model in ``folder`` as ``ValueError``, one line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{folder}: transformers cannot build its model ({type(error).__name__}: {said[:200]}): correct its "
            "config.json, or download it again"
        ) from error


@functools.lru_cache(maxsize=8)
def _counts(folder: str) -> tuple[int, int, int]:
    """Parameters of the model: all, those of an embedding that is only looked up, those of experts."""
    from transformers import AutoModelForCausalLM

    config = _config(folder)
    with torch.device("meta"), _explained(folder):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return num_params(model), 0 if head is not None and head.weight is table else table.numel(), experts


def crosses_documents(model: nn.Module, run: Callable[[], torch.Tensor], first: int) -> bool:
    """Whether the results of ``run``, (1, T, V), after the ``first`` tokens depend on these.

    Exact, whatever the weights and their dtype: the gradient of masked tokens' embeddings is 0.
    """
    embedded: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        embedded.append(result.detach().requires_grad_())
        return embedded[-1]

    training = [module for module in model.modules() if module.training]
    model.eval()  # no dropout
    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            result = run()[0, first:].float()
            if result.isnan().any():
                raise ValueError(f"{type(model).__name__} gives NaN: look at its weights")
            (gradient,) = torch.autograd.grad(result.square().sum(), embedded[:1])
    finally:
        hook.remove()
        for module in training:
            module.training = True
    return bool(gradient[0, :first].any())


def takes_positions(folder: str) -> bool:
    """Whether the model keeps documents apart by their positions."""
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping[type(_config(folder))]
    return "position_ids" in inspect.signature(kind.forward).parameters


_FORMAT = HuggingFace("transformers", lambda name: name, read_config, lambda config, dtype: {}, ())
_SHAPE = {"longest": lambda config: config.longest, "hugging_face": _FORMAT}
TRANSFORMERS = Family("transformers", CausalLMConfig, CausalLM, lambda config: {}, (), **_SHAPE)


#: Operations of transformers' conversions, with their dimensions: experts stacked, and then two such stacks joined.
_STACKED, _JOINED = [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]


def pieces_of(model: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Piece]] | str:
    """By the names of ``model``, which transformers made, the tensors of a checkpoint of ``shapes``; or why a part of
    its parameters cannot be read as parts of these."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return "this version of transformers does not say how it converts checkpoints"
    transforms, whole = get_model_conversion_mapping(model), model.state_dict()
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    gathered: dict[str, dict[str | None, list[str]]] = {}
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, whole)
        if name not in whole and key in whole:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, whole)
        gathered.setdefault(name, {}).setdefault(pattern, []).append(key)
    found: dict[str, list[Piece]] = {}
    tensors = dict(model.named_parameters()) | {n: t for n, t in model.named_buffers() if n in whole}
    for name, tensor in tensors.items():
        keys, shape = gathered.get(name, {}), tuple(tensor.shape)
        if None in keys:
            found[name] = whole_piece(keys[None][0], shape)
        else:
            one = next((c for c in converters if keys.keys() & set(c.source_patterns)), None)
            steps = [(type(op).__name__, getattr(op, "dim", None)) for op in one.operations] if one else []
            if steps not in (_STACKED, _JOINED):
                return f"{name} is not in it, or is made of its tensors by {[kind for kind, _ in steps]}"
            found[name] = _stacked([keys.get(pattern, []) for pattern in one.source_patterns], shapes, shape)
        values = sum(piece.shape.numel() for piece in found[name])
        if values != tensor.numel() or any(tuple(shapes[p.name]) != tuple(p.shape) for p in found[name]):
            return f"{name} has another shape there"
    return found


def _stacked(stacks: list[list[str]], shapes: Mapping[str, Sequence[int]], shape: tuple[int, ...]) -> list[Piece]:
    """One stack of experts' tensors after the other along dimension 1."""
    found, start = [], 0
    for keys in filter(None, stacks):
        stop = start + shapes[keys[0]][0]
        rest = ((start, stop), *((0, size) for size in shape[2:]))
        found += [Piece(key, ((i, i + 1), *rest), stacked=True) for i, key in enumerate(keys)]
        start = stop
    return found


def without_weights(skeleton: nn.Module, folder: str, options: Mapping[str, Any]) -> Any:
    """``skeleton``'s model on the CPU instead of the meta device; each parameter is one value, in an expanded view."""
    from transformers import GenerationConfig

    named = dict(skeleton.named_parameters())
    blank = {
        name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        if name in named
        else torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in skeleton.state_dict().items()
    }
    made = type(skeleton).from_pretrained(None, config=skeleton.config, state_dict=blank, **options)
    if (given := made.generation_config) is not None:
        try:
            made.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except OSError:  # the folder has none
            made.generation_config = given
    return made


def cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``value`` in ``dtype``; one that has no memory of its own (`without_weights`) still has none."""
    alone = value.numel() > 1 and not any(value.stride())
    return value.as_strided((), ()).to(dtype).expand(value.shape) if alone else value.to(dtype)
