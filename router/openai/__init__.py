"""The OpenAI HTTP protocol as data: requests, responses, events."""
