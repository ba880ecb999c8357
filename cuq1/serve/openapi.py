"""The OpenAPI description at /openapi.json: what each path takes, as far as it is read."""

from typing import Any

from cuq1 import __version__
from cuq1.serve.body import EFFORTS, THINKING
from cuq1.serve.settings import MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOPS

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": ["boolean", "null"]}
OBJECT: Schema = {"type": ["object", "null"]}
POSITIVE: Schema = {"type": ["integer", "null"], "minimum": 1}
EFFORT: Schema = {"enum": [None, *EFFORTS]}

SAMPLING: dict[str, Schema] = {
    "model": {"type": ["string", "null"], "description": "any name is served"},
    "stream": BOOLEAN,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN},
    },
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 100},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": -1},
    "seed": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**64 - 1},
    "max_tokens": POSITIVE,
    "stop": {
        "anyOf": [
            {"type": "null"},
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
            {
                "type": "array",
                "maxItems": MAX_STOPS,
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
            },
        ]
    },
    "response_format": {
        "type": ["object", "null"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}},
        },
    },
}


def _without(properties: dict[str, Schema], *names: str) -> dict[str, Schema]:
    return {name: schema for name, schema in properties.items() if name not in names}


TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": STRING},
    "required": ["type", "text"],
}
CALL: Schema = {
    "type": "object",
    "properties": {
        "id": STRING,
        "type": {"enum": ["function"]},
        "function": {"type": "object", "properties": {"name": STRING, "arguments": STRING}, "required": ["name"]},
    },
    "required": ["function"],
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [STRING, {"type": "array", "items": TEXT_PART}, {"type": "null"}]},
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": CALL},
        "tool_call_id": STRING,
    },
    "required": ["role"],
}
TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]+$", "maxLength": 64},
                "description": STRING,
                "parameters": {"type": "object"},
                "strict": BOOLEAN,
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
RENDERED: dict[str, Schema] = {
    "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
    "tools": {"type": ["array", "null"], "items": TOOL},
    "chat_template_kwargs": OBJECT,
    "reasoning_effort": EFFORT,
    "enable_thinking": BOOLEAN,
    "thinking": {"type": ["object", "null"], "properties": {"type": {"enum": [None, *THINKING]}}},
    "reasoning": {"type": ["object", "null"], "properties": {"effort": EFFORT}},
}
CHAT: Schema = {
    "type": "object",
    "properties": SAMPLING
    | RENDERED
    | {
        "max_completion_tokens": POSITIVE,
        "tool_choice": {"anyOf": [{"enum": [None, "auto", "none", "required"]}, {"type": "object"}]},
        "parallel_tool_calls": BOOLEAN,
        "logprobs": BOOLEAN,
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_LOGPROBS},
        "n": {"enum": [None, 1]},
    },
    "required": ["messages"],
}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
COMPLETION: Schema = {
    "type": "object",
    "properties": SAMPLING
    | {
        "prompt": {"anyOf": [STRING, IDS, {"type": "array", "items": STRING, "minItems": 1, "maxItems": 1}]},
        "max_tokens": POSITIVE | {"description": "16 where it is left out"},
        "echo": BOOLEAN,
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_LOGPROBS},
        "n": {"enum": [None, 1]},
    },
    "required": ["prompt"],
}
ITEM: Schema = {
    "type": "object",
    "description": "a message, reasoning, function_call or function_call_output",
    "properties": {
        "type": STRING,
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
        "call_id": STRING,
        "name": STRING,
        "namespace": {"type": ["string", "null"]},
        "arguments": STRING,
        "output": {"anyOf": [STRING, {"type": "array", "items": {"type": "object"}}]},
    },
}
RESPONSES: Schema = {
    "type": "object",
    "properties": _without(SAMPLING, "max_tokens", "stream_options", "response_format")
    | {
        "instructions": {"type": ["string", "null"]},
        "input": {"anyOf": [STRING, {"type": "array", "minItems": 1, "items": ITEM}]},
        "tools": {
            "type": ["array", "null"],
            "description": "function and namespace; other types are left out",
            "items": {
                "type": "object",
                "properties": {"type": STRING, "name": STRING, "parameters": OBJECT, "strict": BOOLEAN},
            },
        },
        "tool_choice": {"anyOf": [{"enum": [None, "auto", "none", "required"]}, {"type": "object"}]},
        "parallel_tool_calls": BOOLEAN,
        "max_output_tokens": POSITIVE,
        "reasoning": {
            "type": ["object", "null"],
            "properties": {
                "effort": EFFORT,
                "summary": {"type": ["string", "null"]},
            },
        },
        "text": {"type": ["object", "null"], "properties": {"format": OBJECT}},
        "include": {"type": ["array", "null"], "items": STRING},
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_LOGPROBS},
        "prompt_cache_key": {"type": ["string", "null"]},
        "metadata": OBJECT,
        "chat_template_kwargs": OBJECT,
    },
    "required": ["input"],
}
BLOCKS: Schema = {
    "anyOf": [STRING, {"type": "array", "items": {"type": "object", "properties": {"type": STRING}}}],
    "description": "text, image, document, thinking, tool_use and tool_result blocks",
}
COUNT: Schema = {
    "type": "object",
    "properties": {
        "model": {"type": ["string", "null"], "description": "any name is served"},
        "system": {"anyOf": [STRING, {"type": "array", "items": TEXT_PART}, {"type": "null"}]},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": BLOCKS},
                "required": ["role", "content"],
            },
        },
        "tools": {
            "type": ["array", "null"],
            "description": "the client's own; those that run at a provider are left out",
            "items": {
                "type": "object",
                "properties": {"type": STRING, "name": STRING, "description": STRING, "input_schema": OBJECT},
            },
        },
        "tool_choice": {
            "type": ["object", "null"],
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]},
                "name": STRING,
                "disable_parallel_tool_use": BOOLEAN,
            },
        },
        "thinking": {
            "type": ["object", "null"],
            "properties": {"type": {"enum": ["adaptive", "enabled", "disabled"]}, "budget_tokens": POSITIVE},
        },
        "output_config": {
            "type": ["object", "null"],
            "properties": {"effort": {"enum": [None, "low", "medium", "high", "xhigh", "max"]}, "format": OBJECT},
        },
        "chat_template_kwargs": OBJECT,
    },
    "required": ["messages"],
}
MESSAGES: Schema = COUNT | {
    "properties": COUNT["properties"]
    | {name: SAMPLING[name] for name in ("stream", "temperature", "top_p", "top_k", "seed")}
    | {"max_tokens": {"type": "integer", "minimum": 1}, "stop_sequences": SAMPLING["stop"], "metadata": OBJECT},
    "required": ["messages", "max_tokens"],
}
TOKENIZE: Schema = {
    "type": "object",
    "properties": {"prompt": STRING, "parse_special": BOOLEAN} | RENDERED,
}
DETOKENIZE: Schema = {"type": "object", "properties": {"tokens": IDS}, "required": ["tokens"]}

_ERRORS = {
    "400": "what was asked for cannot be served; the message names the field",
    "401": "the key is missing or wrong",
    "403": "asked by another site's page, or under another name",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "500": "the engine failed while it computed",
    "503": "the queue is full, the engine is starting again, or the server is stopping",
    "529": "the queue is full, where Messages is spoken",
}


def _post(summary: str, schema: Schema, *, stream: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if stream:
        content["text/event-stream"] = {"schema": STRING}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {"200": {"description": "the answer", "content": content}} | _failures(),
        }
    }


def _get(summary: str, media_type: str, *, parameter: str | None = None) -> dict[str, Any]:
    ok = {"description": summary, "content": {media_type: {"schema": {} if media_type.endswith("json") else STRING}}}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": ok} | _failures()}
    if parameter is not None:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": schema}]
    return {"get": operation}


def _failures() -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {status: {"description": text, "content": content} for status, text in _ERRORS.items()}


def description() -> dict[str, Any]:
    """The whole description, as OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "cuq1", "version": __version__},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": _post("OpenAI Chat Completions", CHAT, stream=True),
            "/v1/completions": _post("OpenAI completions: text from a raw prompt", COMPLETION, stream=True),
            "/v1/responses": _post("OpenAI Responses", RESPONSES, stream=True),
            "/v1/messages": _post("Anthropic Messages", MESSAGES, stream=True),
            "/v1/messages/count_tokens": _post("tokens of a Messages request", COUNT),
            "/tokenize": _post("token ids of a text, or of a chat's prompt", TOKENIZE),
            "/detokenize": _post("the text of token ids", DETOKENIZE),
            "/v1/models": _get("the one model", "application/json"),
            "/v1/models/{name}": _get("the one model, under any name", "application/json", parameter="name"),
            "/health": _get("whether the engine computes", "application/json"),
            "/metrics": _get("counters for Prometheus", "text/plain"),
            "/": _get("a page to chat with the model", "text/html"),
        },
    }
