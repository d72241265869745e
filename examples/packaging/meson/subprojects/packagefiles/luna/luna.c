#define LUNA_IMPLEMENTATION
#include "luna.h"
