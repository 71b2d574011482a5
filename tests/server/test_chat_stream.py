"""What a client of POST /v1/chat/completions sees, streamed and whole."""
import json
