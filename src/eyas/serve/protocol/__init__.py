"""The bodies of requests, as pydantic models. They know OpenAI's and vLLM's names; they know no engine."""
