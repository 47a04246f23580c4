"""Programs that use the server as other people's programs do, with functions and a schema in one request.

They need packages that the project does not depend on, and a server, so pytest does not collect them.  Each client is a
module that names its packages; one that is not installed is skipped.  The packages may be in an environment of their own, in
which the project need not be installed::

    bitmirror serve -m smollm2-135m -c 32768
    pip install openai-agents instructor langchain-openai langchain-anthropic jsonschema
    npm install ai @ai-sdk/openai-compatible @ai-sdk/openai
    python -m tests.clients openai_agents vercel_ai --url http://127.0.0.1:8080 --node .

Codex and Claude Code send prompts of about 10000 tokens, and run commands that the model chooses, with the right to read
files only.  The bundled model answers them at once: ``bitmirror serve -m pycoder --chat-template chatml -c 65536``.
"""
