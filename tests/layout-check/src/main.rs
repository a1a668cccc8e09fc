//! Prints a line for each struct (`name size align`) and field (`name.field offset`) that the verbs room uses, as rdma-sys
//! has them.

use std::mem::offset_of;

use rdma_sys::*;

macro_rules! layouts {
    ($($name:ident { $($field:ident),* })*) => {{ $(
        println!("{} {} {}", stringify!($name), size_of::<$name>(), align_of::<$name>());
        $(println!("{}.{} {}", stringify!($name), stringify!($field), offset_of!($name, $field));)*
    )* }};
}

fn main() {
    include!("../fields.rs");
}
