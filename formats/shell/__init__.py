"""Shell of both commands: entry, errors, options, output. No other part of formats uses click."""
