/* Says of which sources the library was compiled; see native.py. */

#include <stdint.h>

const uint32_t sources = SOURCES;
