"""Content of a message as segments, with images in their slots."""

from collections.abc import Iterator, Mapping, Sequence

from k3jax.chat.segments import Segment
from k3jax.tokenizer import control as control_tokens

PLACEHOLDER = "<|kimi_image_placeholder|>"
_IMAGE_TYPES = ("image", "image_url")


def image_prompt(width: int, height: int, pads: int = 1) -> str:
    """The prompt of one image of `width` x `height` pixels (before any resize).

    `pads` is the number of `<|media_pad|>` tokens: one that the model expands,
    or the image's feature rows.
    """
    return (
        f"{control_tokens.MEDIA_BEGIN}image {width}x{height}{control_tokens.MEDIA_CONTENT}"
        f"{control_tokens.MEDIA_PAD * pads}{control_tokens.MEDIA_END}"
    )


class ImageSlots:
    """Deals image prompts out to the messages, in the caller's order.

    An image part is a slot. A literal placeholder in text is one too, but only
    when there are prompts for all of them: with a prompt for every image part
    alone, the literals are ordinary text, so that nobody's text can take an image.
    """

    def __init__(self, messages: Sequence[tuple[str, Mapping[str, object]]], images: Sequence[str] = ()) -> None:
        contents = {place: list(_parts(place, message)) for place, message in messages}
        image_parts = sum(part is None for parts in contents.values() for part in parts)
        literals = sum(part.count(PLACEHOLDER) for parts in contents.values() for part in parts if part is not None)
        self._literal_slots = bool(literals) and len(images) == image_parts + literals
        if len(images) != image_parts and not self._literal_slots:
            raise ValueError(
                f"{len(images)} image prompts were given for {image_parts} image parts"
                f" and {literals} literal {PLACEHOLDER} in text; expected one prompt per image part"
            )
        prompts = iter(images)
        self._bodies = {place: self._fill(parts, prompts) for place, parts in contents.items()}

    def body(self, place: str) -> list[Segment]:
        """The segments of a message's content."""
        return self._bodies[place]

    def _fill(self, parts: Sequence[str | None], prompts: Iterator[str]) -> list[Segment]:
        segments: list[Segment] = []
        for part in parts:
            if part is None:
                segments.append(Segment(next(prompts), True))
            elif self._literal_slots:
                segments += _with_literals(part, prompts)
            elif part:
                segments.append(Segment(part))
        return segments


def _with_literals(text: str, prompts: Iterator[str]) -> Iterator[Segment]:
    for i, piece in enumerate(text.split(PLACEHOLDER)):
        if i:
            yield Segment(next(prompts), True)
        if piece:
            yield Segment(piece)


def _parts(place: str, message: Mapping[str, object]) -> Iterator[str | None]:
    """The texts of a content, None for an image."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        yield content or ""
        return
    if not isinstance(content, Sequence):
        raise ValueError(f"{place}.content is a {type(content).__name__}; expected a string or a list of parts")
    for i, part in enumerate(content):
        where = f"{place}.content[{i}]"
        if not isinstance(part, Mapping):
            raise ValueError(f"{where} is a {type(part).__name__}; expected a part object with a 'type'")
        if part.get("type") in _IMAGE_TYPES:
            yield None
        elif isinstance(part.get("text"), str):
            yield str(part["text"])
        else:
            raise ValueError(f"{where} has type {part.get('type')!r} and no text; expected text, image or image_url")
