"""Structured logs: one JSON object a line on standard error, with request ids and never a prompt's or answer's text."""

import json
import logging
import sys
import time

from serving.request import Final

LOGGER = logging.getLogger("k3jax.serving")


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, event and the fields given as `extra={"fields": ...}`."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class PlainLines(logging.Formatter):
    """A record as `event key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the exception if there is one."""
        fields = "".join(f" {key}={value}" for key, value in getattr(record, "fields", {}).items())
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        return f"{record.levelname.lower()}: {record.getMessage()}{fields}{trace}"


def set_up(form: str, level: str) -> None:
    """Sends the service's log to standard error; `form` is json or text, `level` a name such as info."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else PlainLines())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False


def event(name: str, level: int = logging.INFO, **fields: object) -> None:
    """Something has happened."""
    LOGGER.log(level, name, extra={"fields": fields})


class RequestLog:
    """A line for each call when it has ended."""

    def ended(
        self, id: str, protocol: str, ending: str, prompt_tokens: int, finals: list[Final], start: int | float
    ) -> None:
        """Writes the line. `start` is on the monotonic clock."""
        if not LOGGER.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {
            "request_id": id,
            "protocol": protocol,
            "ending": ending,
            "prompt_tokens": prompt_tokens,
            "seconds": round(time.monotonic() - start, 4),
        }
        if finals:
            fields |= {
                "completion_tokens": sum(final.completion_tokens for final in finals),
                "cached_tokens": finals[0].cached_tokens,
                "queued_seconds": round(finals[0].queued_seconds, 4),
                "first_token_seconds": round(finals[0].first_token_seconds, 4),
            }
        event("request", **fields)
