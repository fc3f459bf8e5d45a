"""The page at ``/``: a chat with the model that is served, and a look at how the server does.

Plain HTML, CSS and JavaScript modules, served as they lie in this folder: there is nothing to build, and
nothing comes from anywhere else, which the page's Content-Security-Policy makes sure of. It talks to the same
routes as every other client, and to one of its own, `routes.stats`.

    index.html    what is there                      settings.js   controls -> fields of a request
    style.css     how it looks                       answer.js     a stream -> one answer, and its numbers
    app.js        ties the rest together             messages.js   the conversation on the page
    api.js        HTTP, the key, events, errors      tokens.js     log probabilities, token by token
    dom.js        elements, from text only           panel.js      the live numbers
    snippets.js   a request as curl or Python

Nothing here writes HTML from text: elements are made one by one, and text stays text, whatever a model, a
user or a file name says.
"""

from penstock.serve.playground.assets import PATHS as PATHS
from penstock.serve.playground.routes import router as router

__all__ = ["PATHS", "router"]
