"""An endpoint for OpenAI's clients: all completions that are requested with one key make up one document.

document    a document that a program makes by requests, and the answers to these
branches    the document's sequences: which request continues which turn
requests    the three forms of requests
answers     whole answers and streams
messages    chat messages, between clients and chat templates
errors      errors, in the form that clients expect
keys        which key belongs to which document
app         the routes
server      the HTTP server, in a thread of its own
"""
