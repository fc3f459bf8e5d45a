"""The playground at ``/``: a chat, a comparison of two settings, and metrics of the server.

For an embeddings model, the page shows the similarity of a few texts instead of the chat. For a speech model,
the page shows a text box, a player that starts with the first audio, and the waveform.

The page consists of plain HTML, CSS and JavaScript modules and has no build step. The Content-Security-Policy
of the page allows no content from other origins. The page uses the public API and one additional route,
`routes.stats`.

    index.html    structure                          settings.js   controls -> request fields
    style.css     layout and colours                 answer.js     event stream -> response, times, tokens
    app.js        connects the modules               messages.js   the conversation
    api.js        HTTP, API key, events, errors      tokens.js     log probabilities per token
    dom.js        creates elements from text         panel.js      live statistics beside the chat
    pages.js      selects the page                    compare.js    one prompt with two settings
    metrics.js    the page of metrics                prometheus.js rates and quantiles of /metrics
    chart.js      a line chart                       conversations.js  conversations kept in the browser
    markdown.js   Markdown as elements               images.js     images of the draft
    code.js       the dialog of the request          snippets.js   a request as curl or Python
    similarity.js similarity of texts, for           speech.js     audio of a text, for speech models
                  embeddings models

No module creates HTML from text. Elements are created one by one and text is inserted as text, so output of
the model, input of users and file names cannot inject markup.
"""

from penstock.serve.playground.assets import PATHS as PATHS
from penstock.serve.playground.routes import router as router

__all__ = ["PATHS", "router"]
