"""An ordinary Flower app with the two lines that compress its traffic."""
