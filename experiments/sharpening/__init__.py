"""Sharpening against task reward, P2's regimes beside their exact targets: `python -m experiments.sharpening NAME ...`.

    regimes       train each regime, and its distance to its own exact optimum; pass@k and maj@k
    fixed_length  the same with the stop token ignored in training: what is left without the bias to short answers
    instability   seeds and learning rates: fall from the peak, spread over seeds, collapse of the length
    dials         where sharpening helps: the sign of one covariance of the reference, over many references
    principles    the identity, the length's closed form, the most likely completion, alpha below 1

Each writes results/sharpening_NAME: config.json, CSV files, figures and table.txt, all of it in minutes on one core.
`world` sums over all completions of a reference, `training` trains side by side, `tables` writes; then one module each.
"""
