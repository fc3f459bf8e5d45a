"""The playground at ``/``: a chat with the served model, and live statistics of the server.

For an embeddings model the page shows the similarity of a few texts in place of the chat. For a speech model
it shows a text box, a player that starts with the first audio, and the waveform.

Plain HTML, CSS and JavaScript modules without a build step. The Content-Security-Policy of the page allows no
content from other origins. The page uses the public API and one additional route, `routes.stats`.

    index.html    structure                          settings.js   controls -> request fields
    style.css     layout and colours                 answer.js     event stream -> response and its figures
    app.js        connects the modules               messages.js   the conversation
    api.js        HTTP, API key, events, errors      tokens.js     log probabilities per token
    dom.js        creates elements from text         panel.js      live statistics
    snippets.js   a request as curl or Python     similarity.js similarity of texts, for embeddings models
    speech.js     audio of a text, for speech models

No module creates HTML from text. Elements are created one by one and text is inserted as text, so output of
the model, input of users and file names cannot inject markup.
"""

from penstock.serve.playground.assets import PATHS as PATHS
from penstock.serve.playground.routes import router as router

__all__ = ["PATHS", "router"]
