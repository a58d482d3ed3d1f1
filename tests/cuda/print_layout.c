// SPDX-License-Identifier: Apache-2.0
/* Prints the size of every structure of convpool.h, and the place and size of every field, as the compiler has them. */
#include <stddef.h>
#include <stdio.h>

#include "convpool.h"

#define FIELD(type, name) printf("%s %s %zu %zu\n", #type, #name, offsetof(type, name), sizeof(((type *)0)->name))

int main(void) {
    printf("ABI %d\n", CONVPOOL_ABI_VERSION);
#include FIELDS
    return 0;
}
