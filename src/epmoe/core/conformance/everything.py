"""All checks of the suite in one namespace, for test files that take it over for one stage."""

from epmoe.core.conformance import (
    test_ambient,
    test_contract,
    test_failures,
    test_graphs,
    test_layouts,
    test_life,
    test_memory,
    test_numerics,
    test_placements,
    test_properties,
    test_values,
)

for _module in (
    test_values,
    test_layouts,
    test_numerics,
    test_contract,
    test_failures,
    test_life,
    test_ambient,
    test_memory,
    test_placements,
    test_properties,
    test_graphs,
):
    for _name, _value in vars(_module).items():
        if _name.startswith("test_"):
            if _name in globals():
                raise NameError(f"two checks are called {_name}")
            globals()[_name] = _value

# a star import takes what does not begin with an underscore: leave it the checks alone
__all__ = [name for name in globals() if name.startswith("test_") and callable(globals()[name])]
